"""Pictures of runs, from their log histories: what a training did, at the size of a README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..files import write_file
from ..metrics import evaluation_metrics

# One line of `trainer.state.log_history` after the other.
History = Sequence[Mapping[str, Any]]

Series = tuple[Sequence[float], Sequence[float]]

# Properties of lines, by the name of what they show.
Styles = Mapping[str, Mapping[str, Any]]

# Okabe and Ito's colours, which colour-blind readers can tell apart; dashes tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

DASHES = ("-", "--", "-.", ":")


def series(history: History, key: str) -> Series:
    """Get what a run logged under a key.

    Args:
        history (sequence of `dict`): `trainer.state.log_history`, or that of `trainer_state.json`.
        key (`str`): for example `"eval_accuracy"` or `"energy/noise_share"`.

    Returns:
        The steps, and the values at them; both empty where the key was never logged. What is logged again at a step
        is left out: after training, the last step's number may be that of the best checkpoint.

    Example:

    ```python
    >>> from entame_hf.plots import series

    >>> series([{"loss": 2.3, "step": 1}, {"eval_loss": 2.0, "step": 1}, {"loss": 1.9, "step": 2}], "loss")
    ([1, 2], [2.3, 1.9])
    ```
    """
    values: dict[float, float] = {}
    for entry in history:
        if isinstance(entry.get(key), (int, float)) and "step" in entry:
            values.setdefault(entry["step"], entry[key])
    return list(values), list(values.values())


def accuracy_curves(
    runs: Mapping[str, Sequence[Series]],
    *,
    title: str = "Accuracy in evaluation",
    styles: Styles | None = None,
    ax: Axes | None = None,
) -> Figure | None:
    """Draw how the accuracy of several methods grows, with the spread over seeds.

    Args:
        runs (`dict` of lists): for each method, one (steps, accuracies in [0, 1]) a seed; see [`series`].
        title (`str`, *optional*): stands over the picture.
        styles (`dict` of `dict`, *optional*):
            By method, properties of its line, such as `{"entame": {"color": "black"}}`. The others have the colours of
            Okabe and Ito in turn.
        ax (`matplotlib.axes.Axes`, *optional*): what to draw into, without a legend, instead of a new figure.

    Returns:
        `matplotlib.figure.Figure` or `None`: nothing was logged. The bands are one standard deviation over seeds, at
        the steps that all seeds have.

    Example:

    ```python
    >>> from entame_hf.plots import accuracy_curves

    >>> figure = accuracy_curves({"entame": [([1, 2], [0.1, 0.3]), ([1, 2], [0.2, 0.3])]})
    >>> figure.savefig("accuracy.png")  # doctest: +SKIP
    ```
    """
    axes = axes_for(ax, title, "accuracy")
    if not draw_groups(axes, runs, styles):
        return None
    in_percent(axes)
    return finished(axes, ax)


def noise_energy(history: History) -> Series:
    """Get the steps and the energy of the noise in the error, where a run measured it.

    The error of the estimates ŷ splits into two orthogonal parts, ŷ − y = (ŷ − t·y) + (t − 1)·y. With t = E[ŷyᵀ] /
    E[yyᵀ], the first part is noise: the labels y explain nothing of it. Its energy E‖ŷ − t·y‖² = E[ŷŷᵀ] − E[ŷyᵀ]² /
    E[yyᵀ] is at most the error's, and vanishes with it.
    """
    parts = [
        dict(zip(*series(history, f"energy/{name}"), strict=True)) for name in ("estimates", "alignment", "labels")
    ]
    steps = [step for step in parts[0] if all(step in part for part in parts)]
    energies = [[part[step] for part in parts] for step in steps]
    return steps, [max(estimates - alignment**2 / labels, 0.0) for estimates, alignment, labels in energies]


def error_energy_figure(history: History) -> Figure | None:
    """Draw the energy of one run's error over steps, split into noise and signal; None for fewer than two steps."""
    noise, total = (dict(zip(*run, strict=True)) for run in (noise_energy(history), series(history, "energy/total")))
    steps = sorted(noise.keys() & total.keys())
    if len(steps) < 2:
        return None
    axes = axes_for(None, "Energy of the error", "energy, E‖ŷ − y‖²")
    parts = [[noise[step] for step in steps], [max(total[step] - noise[step], 0.0) for step in steps]]
    labels = ("noise, which the labels do not explain", "signal, which the head has yet to learn")
    axes.stackplot(steps, parts, labels=labels, colors=(COLOURS[1], COLOURS[5]), alpha=0.8)
    axes.set(xlim=(steps[0], steps[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    if steps[-1] >= 50 * max(steps[0], 1):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    return finished(axes, None)


def feature_variance_curves(runs: Mapping[str, Sequence[Series]]) -> Figure | None:
    """Draw the variance of the classifier's input over steps: a sudden change is the damage that noise does.

    For each method, one (steps, variances) a seed; of `"energy/feature_var"`. The scale is logarithmic where the
    variance changes by a factor of ten or more. None for fewer than two steps.

    Source: figure 1 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """
    axes = axes_for(None, "Variance of the classifier's input", "mean variance of a feature")
    if draw_groups(axes, runs) < 2:
        return None
    values = np.concatenate([np.asarray(run[1], dtype=float) for group in runs.values() for run in group])
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) and positive.max() >= 10 * positive.min():
        axes.set_yscale("log")
    return finished(axes, None)


def learning_curves(history: History) -> Figure | None:
    """Draw the losses of one run beside the metrics in [0, 1] of its evaluations; None where nothing was logged."""
    losses = {"training": [series(history, "loss")], "evaluation": [series(history, "eval_loss")]}
    names = dict.fromkeys(name for entry in history for name in evaluation_metrics(entry) if name != "loss")
    logged = {name.replace("_", " "): series(history, f"eval_{name}") for name in names}
    shares = {name: [run] for name, run in logged.items() if all(0 <= value <= 1 for value in run[1])}
    panels = [(name, runs) for name, runs in (("loss", losses), ("metrics in evaluation", shares)) if _any(runs)]
    if not panels:
        return None
    figure = Figure(figsize=(4 * len(panels) + 1, 3.6), dpi=150, layout="constrained")
    for axes, (name, runs) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(title=name[0].upper() + name[1:], xlabel="optimizer step")
        axes.grid(alpha=0.3)
        draw_groups(axes, runs)
        if name == "loss":
            axes.set_ylabel("cross-entropy loss")
        else:
            in_percent(axes)
        axes.legend(frameon=False)
    return figure


def save_figures(figures: Mapping[str, Figure | None], folder: str | Path) -> list[str]:
    """Write figures as PNG files, by their names without the ending; leave out None, and return the files' names."""
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(f"{name}.png")
            # The default holds matplotlib's version: the same run gives the same bytes.
            save = partial(figure.savefig, format="png", metadata={"Software": None})
            write_file(Path(folder, written[-1]), save)
    return written


def _any(runs: Mapping[str, Sequence[Series]]) -> bool:
    return any(len(steps) for group in runs.values() for steps, _ in group)


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
