"""Which δ the rule of the head's learning rate should have, read off runs at rates that were set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .head_rates import by_base, by_rate, in_order, middle, name_in_curves
from .runs import Group, Run, short
from .statistics import Values
from .tables import MISSING, final, markdown, mean

CANDIDATES = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0)


class Setting(NamedTuple):
    """One cell at one base rate with one method: what each δ costs there, in percentage points."""

    optimizer: str
    base: float
    method: str
    costs: dict[float, float]


def delta_table(groups: Sequence[Group]) -> str:
    """Compare values of δ by what they cost in accuracy at the end, over the best of the rates that were set.

    The rule's rates are proportional to δ, for Adam and for SGD: what they are divided by is measured before the first
    update, which no δ has touched. So the rates that were set are those of other δ.

    Args:
        groups (sequence of `Group`): runs that may differ in their base rate and that of the head.

    Returns:
        `str`: a table, or nothing where no setting has both several rates that were set and the rule's.
    """
    settings = _settings(groups)
    rows: dict[tuple[str, str, str], list[Setting]] = {}
    for optimizer in dict.fromkeys(setting.optimizer for setting in settings):
        same = [setting for setting in settings if setting.optimizer == optimizer]
        for setting in same:
            rows.setdefault((optimizer, short(setting.base), setting.method), []).append(setting)
        rows[optimizer, "all", "all"] = same
    header = ["optimizer", "base rate", "method", *(f"δ = {delta:g}" for delta in CANDIDATES)]
    return markdown(header, [[*labels, *_costs(found)] for labels, found in rows.items()]) if rows else ""


def regrets(curve: Mapping[float, Values], unit: float) -> dict[float, float]:
    """Compute what each δ costs: the best mean over the rates that were set, minus that at the δ's rate.

    Args:
        curve (mapping of `float` to values by seed): what was measured at each rate that was set.
        unit (`float`): the rate of δ = 1.

    Returns:
        `dict` of `float`: by δ, in the unit of the values. Between rates, means are interpolated linearly in
        log(rate); a δ whose rate lies outside of those that were set is left out.
    """
    rates = sorted(curve)
    means = [mean(curve[rate]) for rate in rates]
    costs = {}
    for delta in CANDIDATES:
        rate = unit * delta
        # Rates that were computed may miss one that was set by rounding.
        if rates[0] * (1 - 1e-9) <= rate <= rates[-1] * (1 + 1e-9):
            costs[delta] = max(means) - float(np.interp(np.log(rate), np.log(rates), means))
    return costs


def _settings(groups: Sequence[Group]) -> list[Setting]:
    found = []
    for group in groups:
        for model, dataset in group.cells:
            for base, runs in by_base(group, model, dataset).items():
                curves, chosen = by_rate(runs, final)
                optimizer = ", ".join(sorted({str(run.settings.get("optim", "default")) for run in runs}))
                for name in in_order(chosen.keys() & curves.keys()):
                    if len(curves[name]) > 1:
                        found.append(Setting(optimizer, base, name, regrets(curves[name], _unit(runs, name))))
    return sorted(found, key=lambda setting: (setting.optimizer, setting.base))


def _unit(runs: Sequence[Run], method: str) -> float:
    measured = [run for run in runs if name_in_curves(run) == method]
    return middle(run.head_lr / run.logit_step for run in measured if run.head_lr is not None)


def _costs(settings: Sequence[Setting]) -> list[str]:
    """Write the mean and the largest cost of each δ, and of how many settings they are."""
    cells = []
    for delta in CANDIDATES:
        costs = [setting.costs[delta] for setting in settings if delta in setting.costs]
        cells.append(f"{np.mean(costs):.1f}, at most {max(costs):.1f} ({len(costs)})" if costs else MISSING)
    return cells
