"""The head learning rate: what each value is worth, and what the rule that measures it (`head_lr: auto`) is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entame_hf import EntameTrainingArguments

from .groups import Combination, Group, Measure, Run, early, final, in_order, mean, name_of, short
from .significance import LEAST_SEEDS, Values, paired, within_one_error
from .tables import MISSING, lead_entry, markdown, spread

# Values of δ, the rule's one constant: about how far one step moves a logit.
CANDIDATES = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0)
# Rows written before δ could be another value do not name it.
FIRST_DELTA = 0.25


@dataclass(frozen=True)
class Sweep:
    """One method on one combination at one base learning rate, over head learning rates."""

    # The group's title.
    setting: str
    combination: Combination
    base: float
    method: str
    optimizer: str
    # By seed: at each head learning rate that was set, and at the rule's.
    curve: dict[float, Values]
    ruled: Values
    # The rule's rate, as measured and for δ = 1: geometric means over seeds.
    rate: float
    unit: float

    @property
    def best(self) -> float:
        return max(self.curve, key=lambda rate: mean(self.curve[rate]))

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (short(self.base), self.setting)))


def split(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Split runs into those for tables of accuracies, and those of sweeps over the head learning rate.

    A method with several head learning rates is a sweep alone; one with its own rate is both.
    """
    rates: dict[tuple[Combination, str], set[Any]] = {}
    for run in runs:
        rates.setdefault((run.combination, run.method), set()).add(run.settings.get("head_lr"))
    return (
        [run for run in runs if len(rates[run.combination, run.method]) == 1],
        [run for run in runs if rates[run.combination, run.method] != {None}],
    )


def sweeps(groups: Iterable[Group], of: Measure = final) -> list[Sweep]:
    """Arrange runs by combination, base learning rate and method, where head learning rates were set and measured."""
    found = []
    for group in groups:
        for combination in group.combinations:
            by_sweep: dict[tuple[float, str], list[Run]] = {}
            for run in group.runs:
                if run.combination == combination:
                    method = name_of(str(run.settings.get("entame_method", run.method)))
                    by_sweep.setdefault((base_rate(run), method), []).append(run)
            names = in_order(method for _, method in by_sweep)
            for base, method in sorted(by_sweep, key=lambda key: (key[0], names.index(key[1]))):
                found += _sweep(group.title, combination, base, method, by_sweep[base, method], of)
    return found


def _sweep(
    setting: str, combination: Combination, base: float, method: str, runs: list[Run], of: Measure
) -> list[Sweep]:
    curve: dict[float, dict[int, float]] = {}
    ruled: dict[int, float] = {}
    rates, units = [], []
    for run in sorted(runs, key=head_rate):
        value = of(run)
        if value is None:
            continue
        if run.settings.get("head_lr") == "auto":
            ruled[run.seed] = value
            rates.append(head_rate(run))
            units.append(head_rate(run) / float(run.settings.get("logit_step", FIRST_DELTA)))
        else:
            curve.setdefault(head_rate(run), {})[run.seed] = value
    if not curve or not ruled:
        return []
    optimizer = str(runs[0].settings.get("optim", "default"))
    return [Sweep(setting, combination, base, method, optimizer, {**curve}, ruled, middle(rates), middle(units))]


def head_rate(run: Run) -> float:
    """Return a run's head learning rate: set, measured, or the base learning rate times its multiplier."""
    given = run.settings.get("head_lr")
    rate = run.head_lr if given == "auto" else given
    return float(base_rate(run) * run.settings.get("head_lr_multiplier", 1) if rate is None else rate)


def base_rate(run: Run) -> float:
    return float(run.settings.get("learning_rate", EntameTrainingArguments.learning_rate))


def middle(rates: Iterable[float]) -> float:
    """Return the geometric mean, as rates are compared by their ratios."""
    return float(np.exp(np.mean(np.log([*rates]))))


def rule_table(found: Sequence[Sweep]) -> str:
    """Compare the rule with the best head learning rate that was set: one row a sweep, or nothing without sweeps."""
    rows = [
        [
            ", ".join(filter(None, (*sweep.combination, sweep.setting))),
            short(sweep.base),
            sweep.method,
            f"{spread(sweep.curve[sweep.best])} at {short(sweep.best)}",
            f"{spread(sweep.ruled)} at {short(sweep.rate)}",
            # One seed has no standard error.
            MISSING
            if len(sweep.ruled) < 2
            else "yes"
            if within_one_error(sweep.curve[sweep.best], sweep.ruled)
            else "no",
        ]
        for sweep in found
    ]
    header = ["", "base", "method", "best rate that was set", "the rule's", "within one standard error"]
    return markdown(header, rows) if rows else ""


def one_rate_table(found: Sequence[Sweep]) -> str:
    """Compare the rule with one head learning rate for three or more combinations: a row a base rate and method."""
    tables = {
        key: same
        for key, same in _together(found, lambda sweep: (sweep.title, sweep.method)).items()
        if len(same) >= LEAST_SEEDS and len(common_rates(same)) > 1
    }
    columns = sorted({rate for same in tables.values() for rate in common_rates(same)})
    rows = []
    for (title, method), same in tables.items():
        single = {r: {s.combination: mean(s.curve[r]) for s in same} for r in common_rates(same)}
        ruled = _ruled(same)
        best = max(single, key=lambda rate: mean(single[rate]))
        chosen = [f"{pick(s.rate for s in same):.1e}".replace("e-0", "e-") for pick in (min, max)]
        rows.append(
            [
                title,
                method,
                *(f"{mean(single[rate]):.1f}" if rate in single else MISSING for rate in columns),
                f"{mean(ruled):.1f}, at {chosen[0]} to {chosen[1]}",
                lead_entry(paired(ruled, single[best])),
                f"{np.mean([max(map(mean, s.curve.values())) for s in same]):.1f}",
            ]
        )
    header = [
        "base",
        "method",
        *map(short, columns),
        "the rule's",
        "over the best one rate",
        "each combination's best",
    ]
    return markdown(header, rows) if rows else ""


def methods_table(groups: Sequence[Group]) -> str:
    """Compare ENTAME with other methods where each has the rule's rate: one row a base learning rate and measure."""
    entame = name_of("entame")
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for label, of in (("first 10 steps", early), ("at the end", final)):
        found = _together(sweeps(groups, of), lambda sweep: (sweep.title, sweep.method))
        for title, method in found:
            comparison = paired(_ruled(found.get((title, entame), [])), _ruled(found[title, method]))
            if method != entame and comparison is not None and comparison.n >= LEAST_SEEDS:
                rows.setdefault((title, label), {})[method] = lead_entry(comparison)
    methods = in_order(method for row in rows.values() for method in row)
    entries = [[*labels, *(rows[labels].get(method, MISSING) for method in methods)] for labels in sorted(rows)]
    return markdown(["base", "accuracy", *(f"over {method}" for method in methods)], entries) if rows else ""


def delta_table(found: Sequence[Sweep]) -> str:
    """Compare values of δ by what they cost in accuracy at the end, below the best rate that was set.

    The rule's rate is proportional to δ: what it is divided by is measured before the first update. So each rate that
    was set belongs to a δ.
    """
    rows: dict[tuple[str, str, str], list[dict[float, float]]] = {}
    usable = [sweep for sweep in found if len(sweep.curve) > 1]
    for optimizer in sorted({sweep.optimizer for sweep in usable}):
        same = sorted((sweep for sweep in usable if sweep.optimizer == optimizer), key=lambda sweep: sweep.base)
        for sweep in same:
            rows.setdefault((optimizer, short(sweep.base), sweep.method), []).append(
                delta_costs(sweep.curve, sweep.unit)
            )
        rows[optimizer, "all", "all"] = [delta_costs(sweep.curve, sweep.unit) for sweep in same]
    header = ["optimizer", "base", "method", *(f"δ = {delta:g}" for delta in CANDIDATES)]
    return markdown(header, [[*labels, *_cost_entries(costs)] for labels, costs in rows.items()]) if rows else ""


def delta_costs(curve: Mapping[float, Values], unit: float) -> dict[float, float]:
    """Return what each δ costs: the best mean over the rates that were set, minus that at the δ's rate.

    `unit` is the rate for δ = 1. Means are interpolated linearly in log(rate); rates beyond the curve are left out.
    """
    rates = sorted(curve)
    means = [mean(curve[rate]) for rate in rates]
    return {
        delta: max(means) - float(np.interp(np.log(unit * delta), np.log(rates), means))
        for delta in CANDIDATES
        # A computed rate may miss one that was set by rounding.
        if rates[0] * (1 - 1e-9) <= unit * delta <= rates[-1] * (1 + 1e-9)
    }


def common_rates(found: Sequence[Sweep]) -> list[float]:
    """Return the head learning rates that were set in every sweep."""
    return sorted(set.intersection(*(set(sweep.curve) for sweep in found))) if found else []


def _together(found: Iterable[Sweep], key: Callable[[Sweep], Any]) -> dict[Any, list[Sweep]]:
    together: dict[Any, list[Sweep]] = {}
    for sweep in found:
        together.setdefault(key(sweep), []).append(sweep)
    return together


def _ruled(found: Sequence[Sweep]) -> Values:
    return {sweep.combination: mean(sweep.ruled) for sweep in found}


def _cost_entries(found: Sequence[dict[float, float]]) -> list[str]:
    entries = []
    for delta in CANDIDATES:
        costs = [each[delta] for each in found if delta in each]
        entries.append(f"{np.mean(costs):.1f}, at most {max(costs):.1f} ({len(costs)})" if costs else MISSING)
    return entries
