"""What a reader looks for in the tables, counted, and where the lines come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .runs import Group, Run, name_of, natural
from .statistics import LEAST_SEEDS, Comparison, summary
from .tables import compare, difference, early, final, p_value


def findings(groups: Sequence[Group]) -> list[str]:
    """Say in sentences what the lines show of ENTAME, and name every cell that disagrees."""
    gains = _comparisons(groups, "base", early)
    over_base, over_keep = _comparisons(groups, "base", final), _comparisons(groups, "keep", final)
    said = [
        _count(
            "ENTAME's mean accuracy over the first 10 steps is above Base's with p < 0.01",
            gains,
            lambda gain: gain.difference > 0 and gain.p < 0.01,
        ),
        _count("Its accuracy at the end is at or above Base's", over_base, lambda gain: gain.difference >= 0),
        _count(
            "Its accuracy at the end is at or above *keep*'s, or below it within the 95 % confidence interval",
            over_keep,
            lambda gain: gain.difference >= 0 or gain.difference + gain.margin >= 0,
        ),
    ]
    best = Counter(method for group in groups for method in _best(group))
    if best:
        wins = ", ".join(f"**{name_of(method)}** ({count})" for method, count in best.most_common())
        said.append(f"Highest mean accuracy at the end, of {best.total()} cells: {wins}.")
    return said


def provenance(runs: Sequence[Run]) -> list[str]:
    """Say how many runs there are, where they ran, of what version, and what they took."""
    seeds = Counter((run.model, run.dataset, run.method, str(run.settings)) for run in runs).values()
    few, many = min(seeds), max(seeds)
    said = [
        f"{len(runs):,} runs, by suite: {_listed(run.suite for run in runs)}; seeds in a cell: "
        f"{few if few == many else f'{few} to {many}'}."
    ]
    for device in sorted({run.device for run in runs}):
        here = [run for run in runs if run.device == device]
        # Runs that shared a device share its time.
        took = sum(run.seconds / run.processes for run in here)
        processes = _listed(str(run.processes) for run in here)
        said.append(
            f"{device}: {len(here):,} runs, {sum(run.seconds for run in here):,.0f} s of them all together; with "
            f"{processes} at a time (seconds ÷ processes, summed) {took:,.0f} s of the device, "
            f"{3600 * len(here) / took:,.0f} runs an hour."
        )
    versions = {name: _listed(run.versions.get(name, "") for run in runs) for name in sorted(_names(runs))}
    said.append(f"Versions: {', '.join(f'{name} {value}' for name, value in versions.items())}.")
    said.append(f"Commits: {_listed(run.commit for run in runs)}.")
    return said + [f"`{command}`" for command in sorted({run.command for run in runs})]


def _comparisons(groups: Iterable[Group], other: str, of: Callable[[Run], float | None]) -> dict[str, Comparison]:
    found = {
        ", ".join(filter(None, (model, dataset, group.title))): compare(group, model, dataset, "entame", other, of)
        for group in groups
        for model, dataset in group.cells
    }
    return {
        cell: comparison
        for cell, comparison in found.items()
        if comparison is not None and comparison.n >= LEAST_SEEDS
    }


def _count(claim: str, found: dict[str, Comparison], holds: Callable[[Comparison], bool]) -> str:
    if not found:
        return f"{claim}: no cell has three seeds of both."
    failing = [f"{cell} ({difference(it)}{p_value(it.p)})" for cell, it in found.items() if not holds(it)]
    named = f" Not with {'; '.join(failing)}." if failing else ""
    return f"{claim}, in **{len(found) - len(failing)} of {len(found)}** cells.{named}"


def _best(group: Group) -> list[str]:
    """The method with the highest mean in each cell that ENTAME and another one ran."""
    winners = []
    for model, dataset in group.cells:
        found = {method: summary(group.values(model, dataset, method, final).values()) for method in group.methods}
        means = {method: it.mean for method, it in found.items() if it is not None}
        if "entame" in means and len(means) > 1:
            winners.append(max(means, key=lambda method: means[method]))
    return winners


def _names(runs: Iterable[Run]) -> set[str]:
    return {name for run in runs for name in run.versions}


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values) - {""}, key=natural)) or "unknown"
