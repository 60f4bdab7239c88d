"""A picture of the classes that a model confuses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from .fonts import shorten, writable

# More classes have no room for a count in every cell, and still more none for their names.
MOST_COUNTS, MOST_NAMES = 20, 50


def confusion_matrix_figure(matrix: np.ndarray, class_names: Sequence[str]) -> Figure | None:
    """Draw counts of examples (C, C), true classes by predicted ones, coloured by the share of each true class.

    Names are written up to 50 classes, and counts up to 20; above, the axes count classes. None if no example was
    counted.
    """
    classes = len(matrix)
    if not matrix.sum():
        return None
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(2.5 + 0.42 * classes, 4.0, 9.0))
    figure = Figure(figsize=(side + 1, side), dpi=150, layout="constrained")
    axes = figure.subplots()
    # A confusion of a few percent must still show.
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=1))
    axes.set(title="Confusion matrix", xlabel="predicted class", ylabel="true class")
    size = 9 if classes <= MOST_COUNTS else 7
    if classes <= MOST_NAMES:
        families, names = writable([shorten(name) for name in class_names])
        axes.set_xticks(range(classes), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(classes), names)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set(family=families, fontsize=size, parse_math=False)
    else:
        axes.set(xlabel="index of the predicted class", ylabel="index of the true class")
    if classes <= MOST_COUNTS:
        # In points: what a cell has for each character of the largest count, as wide as two thirds of its height.
        room = 72 * 0.75 * side / classes / len(f"{matrix.max():,}") / 0.65
        for (row, column), count in np.ndenumerate(matrix):
            dark = shares[row, column] > 0.3
            text = axes.text(column, row, f"{count:,}", ha="center", va="center", color="w" if dark else "0.2")
            text.set_fontsize(min(size, room))
    bar = figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return figure
