"""Pictures of runs, from their log histories: what a training did, at the size of a README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..evaluations import evaluation_metrics

# One line of `trainer.state.log_history` after the other.
History = Sequence[Mapping[str, Any]]
Series = tuple[Sequence[float], Sequence[float]]

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
    zoom_steps: int = 10,
    title: str = "Accuracy in evaluation",
) -> Figure | None:
    """Draw how the accuracy of several methods grows, with the spread over seeds and an inset of the first steps.

    Args:
        runs (`dict` of lists): for each method, one (steps, accuracies in [0, 1]) a seed; see [`series`].
        zoom_steps (`int`, *optional*, defaults to 10):
            The inset's last step. It is left out where fewer than three evaluations lie in it, or none after it.
        title (`str`, *optional*): stands over the picture.

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
    figure, axes = _figure(title, "accuracy")
    steps = _draw(axes, runs)
    if not len(steps):
        return None
    _shares(axes)
    if (steps <= zoom_steps).sum() >= 3 and (steps > zoom_steps).any():
        inset = axes.inset_axes((0.47, 0.1, 0.5, 0.42))
        _draw(inset, runs, last_step=zoom_steps)
        _shares(inset)
        inset.set_title(f"first {zoom_steps} steps", fontsize="small")
        inset.tick_params(labelsize="small")
        inset.grid(alpha=0.3)
    return _with_legend(figure, axes)


def noise_share_curves(
    runs: Mapping[str, Sequence[Series]], *, classes: int, title: str = "Noise in the error"
) -> Figure | None:
    """Draw the noise share of the error over steps, and where a head that knows nothing and says so has it.

    Args:
        runs (`dict` of lists): for each method, one (steps, noise shares) a seed; of `"energy/noise_share"`.
        classes (`int`): C; the line is at 1/(C − 1).
        title (`str`, *optional*): stands over the picture.

    Returns:
        `matplotlib.figure.Figure` or `None`: fewer than two steps were logged. The axis ends at 1: later in a
        training, when the error nearly vanishes, the estimates have more energy than the error.
    """
    figure, axes = _figure(title, "noise share of the error")
    if len(_draw(axes, runs)) < 2:
        return None
    axes.axhline(1 / (classes - 1), color="0.4", linewidth=1, label=f"1/(C − 1) = {1 / (classes - 1):.1%}")
    axes.set_ylim(0, min(axes.get_ylim()[1], 1))
    _shares(axes)
    return _with_legend(figure, axes)


def feature_variance_curves(
    runs: Mapping[str, Sequence[Series]], *, title: str = "Variance of the classifier's input"
) -> Figure | None:
    """Draw the variance of the classifier's input over steps: a sudden change is the damage that noise does.

    Args:
        runs (`dict` of lists): for each method, one (steps, variances) a seed; of `"energy/feature_var"`.
        title (`str`, *optional*): stands over the picture.

    Returns:
        `matplotlib.figure.Figure` or `None`: fewer than two steps were logged. The scale is logarithmic where the
        variance changes by a factor of ten or more.

    Source: figure 1 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """
    figure, axes = _figure(title, "mean variance of a feature")
    if len(_draw(axes, runs)) < 2:
        return None
    values = np.concatenate([np.asarray(run[1], dtype=float) for group in runs.values() for run in group])
    positive = values[np.isfinite(values) & (values > 0)]
    if len(positive) and positive.max() >= 10 * positive.min():
        axes.set_yscale("log")
    return _with_legend(figure, axes)


def learning_curves(history: History) -> Figure | None:
    """Draw the losses of one run beside the metrics of its evaluations.

    Args:
        history (sequence of `dict`): see [`series`].

    Returns:
        `matplotlib.figure.Figure` or `None`: nothing was logged. Metrics are what evaluations logged in [0, 1].
    """
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
        _draw(axes, runs)
        if name == "loss":
            axes.set_ylabel("cross-entropy loss")
        else:
            _shares(axes)
        axes.legend(frameon=False)
    return figure


def save_figures(figures: Mapping[str, Figure | None], folder: str | Path) -> list[str]:
    """Write figures as PNG files; those that are None are left out.

    Args:
        figures (`dict`): by the file's name without its ending.
        folder (`str` or `Path`): where to; it must exist.

    Returns:
        `list[str]`: the names of the files that were written.
    """
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(f"{name}.png")
            # The default holds matplotlib's version: the same run gives the same bytes.
            figure.savefig(Path(folder, written[-1]), metadata={"Software": None})
    return written


def _any(runs: Mapping[str, Sequence[Series]]) -> bool:
    return any(len(steps) for group in runs.values() for steps, _ in group)


def _figure(title: str, label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel="optimizer step", ylabel=label)
    axes.grid(alpha=0.3)
    return figure, axes


def _draw(axes: Axes, runs: Mapping[str, Sequence[Series]], last_step: float = np.inf) -> np.ndarray:
    """Draw each group's mean and its standard deviation over runs; return the steps that were drawn."""
    drawn: set[float] = set()
    for index, (name, group) in enumerate(runs.items()):
        tables = [dict(zip(*run, strict=True)) for run in group if len(run[0])]
        common = set.intersection(*map(set, tables)) if tables else set()
        steps = sorted(step for step in common if step <= last_step)
        if not steps:
            continue
        values = np.array([[table[step] for step in steps] for table in tables], dtype=float)
        colour = COLOURS[index % len(COLOURS)]
        dashes = DASHES[index % len(DASHES)]
        marker = "o" if len(steps) <= 15 else None
        mean = values.mean(axis=0)
        axes.plot(steps, mean, color=colour, linestyle=dashes, marker=marker, markersize=3, label=name)
        if len(tables) > 1:
            spread = values.std(axis=0, ddof=1)
            axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.18, linewidth=0)
        drawn.update(steps)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return np.array(sorted(drawn))


def _shares(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0 if high - low > 0.05 else None))


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure
