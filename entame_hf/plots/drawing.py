"""What curves have in common: means with their spread, axes in percent, a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

Series = tuple[Sequence[float], Sequence[float]]

# Properties of lines, by the name of what they show.
Styles = Mapping[str, Mapping[str, Any]]

# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

DASHES = ("-", "--", "-.", ":")


def axes_for(ax: Axes | None, title: str, label: str) -> Axes:
    axes = ax or Figure(figsize=(7, 4.4), dpi=150, layout="constrained").subplots()
    axes.set(title=title, xlabel="optimizer step", ylabel=label)
    axes.grid(alpha=0.3)
    return axes


def draw_groups(axes: Axes, runs: Mapping[str, Sequence[Series]], styles: Styles | None = None) -> int:
    """Draw each group's mean and its standard deviation over runs; return how many steps were drawn."""
    drawn: set[float] = set()
    for index, (name, group) in enumerate(runs.items()):
        tables = [dict(zip(*run, strict=True)) for run in group if len(run[0])]
        steps = sorted(set.intersection(*map(set, tables))) if tables else []
        if not steps:
            continue
        values = np.array([[table[step] for step in steps] for table in tables], dtype=float)
        style: dict[str, Any] = {"marker": "o" if len(steps) <= 15 else None, "markersize": 3}
        style |= {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
        style |= (styles or {}).get(name, {})
        mean = values.mean(axis=0)
        axes.plot(steps, mean, label=name, **style)
        if len(tables) > 1:
            spread = values.std(axis=0, ddof=1)
            axes.fill_between(steps, mean - spread, mean + spread, color=style["color"], alpha=0.18, linewidth=0)
        drawn.update(steps)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return len(drawn)


def in_percent(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low > 0.05 else None))


def finished(axes: Axes, ax: Axes | None) -> Figure:
    """Add a legend to a figure that nobody else has drawn into."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    if ax is None:
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure
