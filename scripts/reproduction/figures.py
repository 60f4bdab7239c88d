"""The paper's figures: one picture a model, one panel a data set, and one picture for a first glance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from entame_hf.plots import Series, accuracy_curves, feature_variance_curves
from entame_hf.plots.drawing import draw_groups

from .runs import METHODS, Group, Run, name_of, natural

# The paper's four are blue, orange, green and red, in Okabe and Ito's tones; dashes tell them apart in print.
STYLES: dict[str, dict[str, Any]] = {
    "Base": {"color": "#0072B2", "linestyle": "--"},
    "Base+WU": {"color": "#E69F00", "linestyle": ":"},
    "MEI": {"color": "#009E73", "linestyle": "-."},
    "ENTAME": {"color": "#D55E00", "linestyle": "-", "linewidth": 2, "zorder": 3},
    "keep": {"color": "#000000", "linestyle": (0, (4, 1, 1, 1, 1, 1))},
    "FN": {"color": "#CC79A7", "linestyle": "--"},
}
PEER_COLOURS = ("#56B4E9", "#882255", "#999933", "#332288", "#44AA99", "#AA7744")
DASHES = ("--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
# What the first picture shows in colour, later ones on top: the paper's baseline and the strongest of the others, what
# people do, and the paper's method.
FIRST_GLANCE = ("base", "mei", "LP-FT", "keep", "entame")
GREY: dict[str, Any] = {"color": "0.78", "linestyle": "-", "linewidth": 1, "zorder": 1}
MAIN = ("base", "base_wu", "mei", "entame", "keep")
COMPARED = ("entame", "keep")


def accuracy_of(run: Run) -> Series:
    steps = sorted(run.accuracies)
    return steps, [run.accuracies[step] for step in steps]


def feature_variance_of(run: Run) -> Series:
    return run.energy("feature_var")


def styles_of(groups: Iterable[Group]) -> dict[str, dict[str, Any]]:
    """Give every method its colour and dashes, the same in all pictures of a report."""
    peers = sorted({run.method for group in groups for run in group.runs} - set(METHODS), key=natural)
    return STYLES | {
        peer: {"color": PEER_COLOURS[i % len(PEER_COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        for i, peer in enumerate(peers)
    }


def model_figures(group: Group, model: str, styles: dict[str, dict[str, Any]]) -> dict[str, Figure | None]:
    """Draw accuracy and variance of the features on all data sets: the paper's methods, and the others by themselves.

    Returns:
        Figures by kind, `"accuracy"`, `"peers"` and `"feature_variance"`; None where there is nothing to see.
    """
    main = [method for method in group.methods if method in MAIN]
    others = [method for method in group.methods if method in COMPARED or method not in MAIN]

    def figure(
        draw: Callable[..., Figure | None], methods: Sequence[str], of: Callable[[Run], Series]
    ) -> Figure | None:
        def panel(axes: Axes, dataset: str) -> bool:
            runs = {name_of(method): [of(run) for run in group.select(model, dataset, method)] for method in methods}
            return draw(runs, title=f"{model} on {dataset}", styles=styles, ax=axes) is not None

        return _panels(panel, group.datasets, plain(group.title))

    peers = others if set(others) - set(COMPARED) else []
    return {
        "accuracy": figure(accuracy_curves, main, accuracy_of),
        "peers": figure(accuracy_curves, peers, accuracy_of),
        "feature_variance": figure(feature_variance_curves, main, feature_variance_of),
    }


def overview(group: Group, styles: dict[str, dict[str, Any]]) -> Figure:
    """Draw the accuracy of up to three cells over the logarithm of the steps, with all other methods in grey."""
    cells = [(group.models[0], dataset) for dataset in group.datasets]
    if len(cells) == 1:
        cells = [(model, group.datasets[0]) for model in group.models]
    cells = cells[:3]
    first = [method for method in FIRST_GLANCE if method in group.methods]
    others = [method for method in group.methods if method not in first]
    solid = {"linestyle": "-", "linewidth": 2.2}
    styles = {
        name_of(method): GREY if method in others else styles[name_of(method)] | solid for method in group.methods
    }
    figure = Figure(figsize=(max(7, 1 + 3.6 * len(cells)), 3.8), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(cells), sharey=True, squeeze=False)[0]
    for axes, (model, dataset) in zip(panels, cells, strict=True):
        runs = {
            name_of(method): [accuracy_of(run) for run in group.select(model, dataset, method)]
            for method in (*others, *first)
        }
        steps = draw_groups(axes, runs, {name: style | {"marker": None} for name, style in styles.items()})
        axes.set(title=f"{model} on {dataset}", xlabel="optimizer step", xscale="log", ylim=(0, 1))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if len(steps):
            axes.set_xlim(1, steps.max())
    panels[0].set_ylabel("accuracy on the test part")
    handles = [Line2D([], [], label=name, **styles[name]) for name in map(name_of, first)]
    handles += [Line2D([], [], label="other methods", **GREY)] if others else []
    title = plain(group.title) or None
    figure.legend(handles=handles, title=title, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def plain(title: str) -> str:
    """Write a group's title without Markdown."""
    return title.replace("`", "")


def _panels(draw: Callable[[Axes, str], bool], names: Sequence[str], title: str) -> Figure | None:
    """Draw one panel a name, with one legend below all; None where no panel has anything to show."""
    columns = 2 if len(names) in (2, 4) else min(3, len(names))
    rows = math.ceil(len(names) / columns)
    width = max(7, 4.5 * columns)
    figure = Figure(figsize=(width, 3.8 * rows + 0.4), dpi=120, layout="constrained")
    handles: dict[str, Any] = {}
    if title:
        figure.suptitle(title)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        if draw(axes, name):
            found, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, found, strict=True))
        else:
            axes.text(0.5, 0.5, "no runs", ha="center", va="center", color="0.5", transform=axes.transAxes)
            axes.set_axis_off()
        if axes not in grid[:, 0]:
            axes.set_ylabel("")
    for axes in grid.flat[len(names) :]:
        axes.remove()
    if not handles:
        return None
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=int(width / 1.4), frameon=False)
    return figure
