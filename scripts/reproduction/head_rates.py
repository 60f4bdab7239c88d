"""How much hangs on the learning rate of the head, and what a rule that measures it is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from entame_hf import EntameTrainingArguments
from entame_hf.plots import Series
from entame_hf.plots.drawing import draw_groups

from .figures import STYLES, plain
from .runs import Group, Run, name_of, short
from .statistics import within_one_error
from .tables import MISSING, final, markdown, mean, spread

MEASURES: dict[str, Callable[[Run], float | None]] = {
    "mean of the first 10 steps": lambda run: run.early,
    "at the end": lambda run: run.final,
}

STAR: dict[str, Any] = {"marker": "*", "markerfacecolor": "none", "markeredgewidth": 1.5}
RULE_HANDLE = {"the rule's choice": Line2D([], [], color="0.3", linestyle="", markersize=13, **STAR)}


def split(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Split runs into those for tables, and points of curves over the learning rate of the head.

    Methods that ran with several of those rates are curves alone; one that has its own is both.
    """
    rates: dict[tuple[str, str, str], set[Any]] = {}
    for run in runs:
        rates.setdefault(_label(run), set()).add(run.settings.get("head_lr"))
    return (
        [run for run in runs if len(rates[_label(run)]) == 1],
        [run for run in runs if rates[_label(run)] != {None}],
    )


def head_rate(run: Run) -> float:
    """Get the learning rate of a run's head: as it was set or measured, or else the base rate times its multiplier."""
    given = run.settings.get("head_lr")
    rate = run.head_lr if given == "auto" else given
    if rate is None:
        rate = base_rate(run) * run.settings.get("head_lr_multiplier", 1)
    return float(rate)


def base_rate(run: Run) -> float:
    return float(run.settings.get("learning_rate", EntameTrainingArguments.learning_rate))


def head_rate_curves(group: Group, model: str, dataset: str) -> Figure | None:
    """Draw accuracy, early and at the end, over the learning rate of the head: a column a base rate, a line a method.

    Bands are one standard deviation over seeds. Hollow stars are what the rule chose (`head_lr: auto`), at the
    geometric mean of the rates that it measured.

    Args:
        group (`Group`): runs that may differ in their base rate and that of the head.
        model, dataset (`str`): labels.

    Returns:
        `matplotlib.figure.Figure` or `None`: there are no such runs.
    """
    bases = by_base(group, model, dataset)
    rates = {head_rate(run) for runs in bases.values() for run in runs if run.settings.get("head_lr") != "auto"}
    if len(rates) < 2:
        return None
    figure, panels = panels_by_base([*bases])
    handles: dict[str, Line2D] = {}
    for row, measure in zip(panels, MEASURES.values(), strict=True):
        for axes, (base, runs) in zip(row, bases.items(), strict=True):
            handles |= _panel(axes, runs, measure)
            axes.axvline(base, color="0.6", linewidth=1, linestyle=":", zorder=0)
    for axes in panels[:, 0]:
        # A band may go beyond what an accuracy can be.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0), min(high, 1))
    handles = {name: handles[name] for name in in_order(handles)}
    if any(run.head_lr is not None for runs in bases.values() for run in runs):
        handles |= RULE_HANDLE
    handles["the base rate"] = Line2D([], [], color="0.6", linewidth=1, linestyle=":")
    finish(figure, f"{model} on {dataset}", group, handles, 2 * len(bases))
    return figure


def panels_by_base(bases: Sequence[float]) -> tuple[Figure, Any]:
    """Make a figure of a row a measure and a column a base rate, for accuracies over the learning rate of the head."""
    figure = Figure(figsize=(1.2 + 3.4 * len(bases), 6), dpi=120, layout="constrained")
    panels = figure.subplots(len(MEASURES), len(bases), sharex=True, sharey="row", squeeze=False)
    for axes, label in zip(panels[:, 0], MEASURES, strict=True):
        axes.set_ylabel(f"accuracy\n{label}")
    for axes, base in zip(panels[0], bases, strict=True):
        axes.set_title(f"base rate {short(base)}")
    for axes in panels[-1]:
        axes.set_xlabel("learning rate of the head")
    return figure, panels


def finish(figure: Figure, title: str, group: Group, handles: Mapping[str, Line2D], columns: int) -> None:
    """Scale the axes of what was drawn; write the legend, and the title with what a group's runs have in common."""
    for axes in figure.axes:
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.suptitle(", ".join(filter(None, (title, plain(group.title)))))
    columns = min(len(handles), columns)
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False)


def rule_table(groups: Sequence[Group]) -> str:
    """Compare what the rule chose with the best of the rates that were set, in accuracy at the end.

    Returns:
        `str`: a table, or nothing where the rule did not choose.
    """
    rows = []
    for group in groups:
        for model, dataset in group.cells:
            for base, runs in by_base(group, model, dataset).items():
                curves, chosen = by_rate(runs, final)
                for name in in_order(chosen.keys() & curves.keys()):
                    best = max(curves[name], key=lambda rate: mean(curves[name][rate]))
                    fixed = curves[name][best]
                    rule = {seed: accuracy for seed, (_, accuracy) in chosen[name].items()}
                    rows.append(
                        [
                            ", ".join(filter(None, (model, dataset, group.title))),
                            short(base),
                            name,
                            f"{spread(fixed)} at {short(best)}",
                            f"{spread(rule)} at {short(middle(rate for rate, _ in chosen[name].values()))}",
                            # One seed has no error.
                            MISSING if len(rule) < 2 else "yes" if within_one_error(fixed, rule) else "no",
                        ]
                    )
    header = ["", "base rate", "method", "best rate set", "the rule's", "within one standard error"]
    return markdown(header, rows) if rows else ""


def by_base(group: Group, model: str, dataset: str) -> dict[float, list[Run]]:
    """Sort the runs of a cell by their base rate."""
    bases: dict[float, list[Run]] = {}
    for run in group.runs:
        if (run.model, run.dataset) == (model, dataset):
            bases.setdefault(base_rate(run), []).append(run)
    return dict(sorted(bases.items()))


def by_rate(
    runs: Sequence[Run], measure: Callable[[Run], float | None]
) -> tuple[dict[str, dict[float, dict[int, float]]], dict[str, dict[int, tuple[float, float]]]]:
    """Sort by method what was measured at each rate of the head that was set, and at the rate that the rule chose."""
    curves: dict[str, dict[float, dict[int, float]]] = {}
    chosen: dict[str, dict[int, tuple[float, float]]] = {}
    for run in sorted(runs, key=head_rate):
        name, value = name_in_curves(run), measure(run)
        if value is not None and run.settings.get("head_lr") == "auto":
            chosen.setdefault(name, {})[run.seed] = head_rate(run), value
        elif value is not None:
            curves.setdefault(name, {}).setdefault(head_rate(run), {})[run.seed] = value
    return curves, chosen


def name_in_curves(run: Run) -> str:
    """Name what a run's line in a picture is of."""
    return name_of(str(run.settings.get("entame_method", run.method)))


def _panel(axes: Axes, runs: Sequence[Run], measure: Callable[[Run], float | None]) -> dict[str, Line2D]:
    curves, chosen = by_rate(runs, measure)
    draw_groups(axes, {name: _series_by_seed(curve) for name, curve in curves.items()}, STYLES)
    for place, name in enumerate(in_order(chosen)):
        rates, values = np.array([*chosen[name].values()]).T
        bar = values.std(ddof=1) if len(values) > 1 else None
        # One within the other where they coincide.
        style = STAR | {"color": STYLES.get(name, {}).get("color", "0.3"), "markersize": max(6, 18 - 5 * place)}
        axes.errorbar(middle(rates), values.mean(), bar, zorder=5, **style)
    return {str(line.get_label()): line for line in axes.get_lines() if not str(line.get_label()).startswith("_")}


def _series_by_seed(curve: dict[float, dict[int, float]]) -> list[Series]:
    seeds = sorted(set().union(*curve.values()))
    points = [[(rate, values[seed]) for rate, values in curve.items() if seed in values] for seed in seeds]
    return [([rate for rate, _ in each], [value for _, value in each]) for each in points]


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names of methods as legends and tables have them."""
    return sorted(names, key=lambda name: ([*STYLES, name].index(name), name))


def middle(rates: Iterable[float]) -> float:
    """Get the geometric mean: rates are compared by their ratios."""
    return float(np.exp(np.mean(np.log([*rates]))))


def _label(run: Run) -> tuple[str, str, str]:
    return run.model, run.dataset, run.method
