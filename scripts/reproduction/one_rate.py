"""Whether one learning rate of the head would serve many models, and whether one rule that measures it does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from entame_hf.plots.drawing import COLOURS, DASHES

from .head_rates import MEASURES, RULE_HANDLE, STAR, by_base, by_rate, finish, in_order, middle, panels_by_base
from .runs import Group, name_of, natural, short
from .statistics import LEAST_SEEDS, paired
from .tables import MISSING, Measure, early, final, markdown, mean, tested

Cell = tuple[str, str]


class Sweep(NamedTuple):
    """What a cell has at each rate of the head that was set, and at the one that the rule chose: means over seeds."""

    curve: dict[float, float]
    rate: float
    value: float


def one_rate_table(groups: Sequence[Group]) -> str:
    """Compare the rule with one rate for all cells, in accuracy at the end.

    Args:
        groups (sequence of `Group`): runs that may differ in their base rate and that of the head.

    Returns:
        `str`: a table of means over cells, one row a base rate and method; or nothing where the rule chose in fewer
        than three cells of each.
    """
    rows: list[list[str]] = []
    found = [
        (group, base, method, sweeps)
        for group in groups
        for (base, method), sweeps in _sweeps(group, final).items()
        if len(sweeps) >= LEAST_SEEDS and len(_common(sweeps)) > 1
    ]
    columns = sorted({rate for *_, sweeps in found for rate in _common(sweeps)})
    for group, base, method, sweeps in found:
        rates = _common(sweeps)
        ruled = _ruled(sweeps)
        single = {rate: {cell: sweep.curve[rate] for cell, sweep in sweeps.items()} for rate in rates}
        best = max(rates, key=lambda rate: mean(single[rate]))
        comparison = paired(ruled, single[best])
        assert comparison is not None
        chosen = sorted(sweep.rate for sweep in sweeps.values())
        rows.append(
            [
                _setting(base, group),
                method,
                *(f"{mean(single[rate]):.1f}" if rate in single else MISSING for rate in columns),
                f"{mean(ruled):.1f}, at {chosen[0]:.1e} to {chosen[-1]:.1e}".replace("e-0", "e-"),
                tested(comparison),
                f"{np.mean([max(sweep.curve.values()) for sweep in sweeps.values()]):.1f}",
            ]
        )
    header = ["base rate", "method", *map(short, columns), "the rule's", "over the best one rate", "each cell's best"]
    return markdown(header, rows) if rows else ""


def methods_table(groups: Sequence[Group]) -> str:
    """Compare ENTAME with other methods where each has the rate that the rule chose.

    Returns:
        `str`: a table of differences over cells, one row a base rate and measure; or nothing where ENTAME and another
        method share fewer than three cells.
    """
    entame = name_of("entame")
    found: dict[tuple[str, str], dict[str, str]] = {}
    for group in groups:
        for label, of in zip(MEASURES, (early, final), strict=True):
            sweeps = _sweeps(group, of)
            for base, method in sweeps:
                comparison = paired(_ruled(sweeps.get((base, entame), {})), _ruled(sweeps[base, method]))
                if method != entame and comparison is not None and comparison.n >= LEAST_SEEDS:
                    setting = _setting(base, group)
                    found.setdefault((setting, label), {})[method] = tested(comparison)
    methods = in_order({method for row in found.values() for method in row})
    rows = [[*labels, *(row.get(method, MISSING) for method in methods)] for labels, row in found.items()]
    return markdown(["base rate", "accuracy", *(f"over {method}" for method in methods)], rows) if rows else ""


def one_rate_figure(group: Group, method: str) -> Figure | None:
    """Draw accuracy over the learning rate of the head: a column a base rate, a line a model, averaged over data sets.

    Hollow stars are what the rule chose for each model, at the geometric mean of its rates.

    Args:
        group (`Group`): runs that may differ in their base rate and that of the head.
        method (`str`): as legends name it, such as ENTAME.

    Returns:
        `matplotlib.figure.Figure` or `None`: there are fewer than two models.
    """
    models = sorted(group.models, key=natural)
    measured = {
        label: {base: sweeps for (base, name), sweeps in _sweeps(group, of).items() if name == method}
        for label, of in MEASURES.items()
    }
    bases = [*measured["at the end"]]
    if len(models) < 2 or not bases:
        return None
    figure, panels = panels_by_base(bases)
    styles: dict[str, dict[str, Any]] = {
        model: {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}
        for index, model in enumerate(models)
    }
    for row, found in zip(panels, measured.values(), strict=True):
        for axes, base in zip(row, bases, strict=True):
            for model, style in styles.items():
                sweeps = {cell: sweep for cell, sweep in found.get(base, {}).items() if cell[0] == model}
                if not (rates := _common(sweeps)):
                    continue
                means = [np.mean([sweep.curve[rate] for sweep in sweeps.values()]) for rate in rates]
                axes.plot(rates, means, marker="o", markersize=3, linewidth=1.2, **style)
                ruled = np.mean([sweep.value for sweep in sweeps.values()])
                rate = middle(sweep.rate for sweep in sweeps.values())
                axes.plot(rate, ruled, linestyle="", zorder=5, markersize=13, color=style["color"], **STAR)
    handles = {model: Line2D([], [], **style) for model, style in styles.items()} | RULE_HANDLE
    finish(figure, f"{method}, mean over {', '.join(group.datasets)}", group, handles, 2 * len(bases))
    return figure


def methods_of(group: Group) -> list[str]:
    """Name the methods for which the rule chose a rate, as legends have them."""
    return in_order({method for _, method in _sweeps(group, final)})


def _sweeps(group: Group, of: Measure) -> dict[tuple[float, str], dict[Cell, Sweep]]:
    """Arrange what was measured by base rate and method, then by cell: where rates were set, and the rule chose."""
    found: dict[tuple[float, str], dict[Cell, Sweep]] = {}
    for cell in group.cells:
        for base, runs in by_base(group, *cell).items():
            curves, chosen = by_rate(runs, of)
            for name in chosen.keys() & curves.keys():
                rates, values = zip(*chosen[name].values(), strict=True)
                curve = {rate: mean(at) for rate, at in curves[name].items()}
                found.setdefault((base, name), {})[cell] = Sweep(curve, middle(rates), float(np.mean(values)))
    names = in_order({name for _, name in found})
    return {key: found[key] for key in sorted(found, key=lambda key: (key[0], names.index(key[1])))}


def _ruled(sweeps: dict[Cell, Sweep]) -> dict[Cell, float]:
    return {cell: sweep.value for cell, sweep in sweeps.items()}


def _setting(base: float, group: Group) -> str:
    return ", ".join(filter(None, (short(base), group.title)))


def _common(sweeps: dict[Cell, Sweep]) -> list[float]:
    """Find the rates that were set in every cell."""
    curves = [set(sweep.curve) for sweep in sweeps.values()]
    return sorted(set.intersection(*curves)) if curves else []
