"""Pictures of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from entame_hf.plots import accuracy_curves

from .groups import METHODS, Combination, Group, Run, early, final, in_order, mean, name_of, natural, short
from .head_rates import Sweep, common_rates, sweeps

# The paper's four are blue, orange, green and red, here in Okabe and Ito's tones; dashes tell them apart in print.
STYLES: dict[str, dict[str, Any]] = {
    "Base": {"color": "#0072B2", "linestyle": "--"},
    "Base+WU": {"color": "#E69F00", "linestyle": ":"},
    "MEI": {"color": "#009E73", "linestyle": "-."},
    "ENTAME": {"color": "#D55E00", "linestyle": "-", "linewidth": 2, "zorder": 3},
    "keep": {"color": "#000000", "linestyle": (0, (4, 1, 1, 1, 1, 1))},
    "FN": {"color": "#CC79A7", "linestyle": "--"},
}
COLOURS = ("#56B4E9", "#882255", "#999933", "#332288", "#44AA99", "#AA7744", "#0072B2")
DASHES = ("--", "-.", ":", (0, (6, 2)), (0, (3, 1, 1, 1)), (0, (1, 1)))
# Methods in colour in the first picture, later ones on top; all others are grey.
FIRST_GLANCE = ("base", "mei", "LP-FT", "keep", "entame")
GREY: dict[str, Any] = {"color": "0.78", "linestyle": "-", "linewidth": 1, "zorder": 1}
STAR: dict[str, Any] = {"marker": "*", "markerfacecolor": "none", "markeredgewidth": 1.5, "markersize": 13}


def styles_of(groups: Iterable[Group]) -> dict[str, dict[str, Any]]:
    """Return each method's colour and dashes, the same in all pictures of a report."""
    return STYLES | _styles({run.method for group in groups for run in group.runs} - set(METHODS))


def overview(group: Group, styles: dict[str, dict[str, Any]]) -> Figure:
    """Draw accuracy over steps on up to three combinations, with bands of one standard deviation over seeds."""
    panels = [(group.models[0], dataset) for dataset in group.datasets]
    if len(panels) == 1:
        panels = [(model, group.datasets[0]) for model in group.models]
    panels = panels[:3]
    first = [method for method in FIRST_GLANCE if method in group.methods]
    others = [method for method in group.methods if method not in first]
    solid = {"linestyle": "-", "linewidth": 2.2, "marker": None}
    drawn = {
        name_of(m): {**GREY, "marker": None} if m in others else styles[name_of(m)] | solid for m in group.methods
    }
    figure = Figure(figsize=(max(7, 1 + 3.6 * len(panels)), 3.8), dpi=150, layout="constrained")
    for axes, combination in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        runs = {name_of(method): _accuracies(group, combination, method) for method in (*others, *first)}
        accuracy_curves(runs, title=" on ".join(combination), styles=drawn, ax=axes)
        axes.set(xscale="log", ylim=(0, 1), xlim=(1, None), ylabel="")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("accuracy on the test split")
    handles = [Line2D([], [], label=name, **drawn[name]) for name in map(name_of, first)]
    handles += [Line2D([], [], label="other methods", **GREY)] if others else []
    title = group.plain_title or None
    figure.legend(handles=handles, title=title, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def head_rate_figure(group: Group) -> Figure | None:
    """Draw ENTAME's accuracy over the head learning rate: a column a base learning rate, a line a model.

    Accuracies are means over datasets. With one model alone, there is a line a method. Hollow stars are the rule's
    rates.
    """
    measured = {"mean of the first 10 steps": sweeps([group], early), "at the end": sweeps([group], final)}
    several = len(group.models) > 1
    for label, found in measured.items() if several else ():
        measured[label] = [sweep for sweep in found if sweep.method == name_of("entame")]
    bases = sorted({sweep.base for sweep in measured["at the end"]})
    if not bases:
        return None
    figure = Figure(figsize=(1.2 + 3.4 * len(bases), 6), dpi=120, layout="constrained")
    panels = figure.subplots(len(measured), len(bases), sharex=True, sharey="row", squeeze=False)
    labels = group.models if several else in_order({sweep.method for sweep in measured["at the end"]})
    styles = _styles(labels) if several else STYLES | _styles(set(labels) - set(STYLES))
    for row, (label, found) in zip(panels, measured.items(), strict=True):
        row[0].set_ylabel(f"accuracy\n{label}")
        for axes, base in zip(row, bases, strict=True):
            axes.axvline(base, color="0.6", linewidth=1, linestyle=":", zorder=0)
            axes.set(title=f"base learning rate {short(base)}" if label != "at the end" else "", xscale="log")
            for name in labels:
                same = [s for s in found if s.base == base and name == (s.combination[0] if several else s.method)]
                if same:
                    _draw_sweeps(axes, same, name, styles[name])
            axes.grid(alpha=0.3)
            axes.yaxis.set_major_formatter(PercentFormatter(100, decimals=0))
    for axes in panels[-1]:
        axes.set_xlabel("head learning rate")
    handles = {name: Line2D([], [], marker="o", markersize=3, **styles[name]) for name in labels}
    handles["the rule's rate"] = Line2D([], [], color="0.3", linestyle="", **STAR)
    handles["the base learning rate"] = Line2D([], [], color="0.6", linewidth=1, linestyle=":")
    title = "ENTAME, mean over datasets" if several else f"{group.models[0]}, mean over datasets"
    figure.suptitle(", ".join(filter(None, (title, group.plain_title))))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2 * len(bases), frameon=False)
    return figure


def _draw_sweeps(axes: Any, same: Sequence[Sweep], name: str, style: dict[str, Any]) -> None:
    rates = common_rates(same)
    means = [np.mean([mean(sweep.curve[rate]) for sweep in same]) for rate in rates]
    axes.plot(rates, means, marker="o", markersize=3, label=name, **style)
    rate = np.exp(np.mean(np.log([sweep.rate for sweep in same])))
    ruled = np.mean([mean(sweep.ruled) for sweep in same])
    axes.plot(rate, ruled, color=style["color"], linestyle="", zorder=5, **STAR)


def _accuracies(group: Group, combination: Combination, method: str) -> list[Any]:
    runs: Sequence[Run] = group.select(combination, method)
    return [([*run.accuracies], [*run.accuracies.values()]) for run in runs]


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    ordered = sorted(names, key=natural)
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i % len(DASHES)]}
        for i, name in enumerate(ordered)
    }
