"""What a reader looks for in the tables, counted, and where the lines come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from .runs import METHODS, Group, Run, name_of, natural
from .statistics import LEAST_SEEDS, Comparison, summary
from .tables import AHEAD, BEHIND, UNDECIDED, Measure, compare, difference, early, final, p_value, sides

MEASURES = {"over the first 10 steps": early, "at the end": final}
UNTESTED = "no cell has three seeds of both"


def findings(groups: Sequence[Group]) -> list[str]:
    """Say in sentences what the lines show of ENTAME, and name the cells that disagree."""
    said = [
        _count(
            "ENTAME's mean accuracy over the first 10 steps is above Base's with p < 0.01",
            _comparisons(groups, "base", early),
            lambda gain: gain.difference > 0 and gain.p < 0.01,
        ),
        f"Against Base at the end: {_standing(_comparisons(groups, 'base', final))}.",
        f"Against *keep* at the end: {_standing(_comparisons(groups, 'keep', final))}.",
    ]
    won = _won(groups)
    if won:
        wins = ", ".join(
            f"**{name_of(method)}** ({len(cells)}{'' if method == 'entame' else ': ' + ', '.join(cells)})"
            for method, cells in sorted(won.items(), key=lambda item: -len(item[1]))
        )
        said.append(f"Highest mean accuracy at the end, of {sum(map(len, won.values()))} cells: {wins}.")
    for peer in sorted({method for group in groups for method in group.methods} - set(METHODS), key=natural):
        standings = [f"{when}, {_standing(_comparisons(groups, peer, of), False)}" for when, of in MEASURES.items()]
        said.append(f"Against {peer}: {'; '.join(standings)}.")
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


def _comparisons(groups: Iterable[Group], other: str, of: Measure) -> dict[str, Comparison]:
    found = {
        _cell(group, model, dataset): compare(group, model, dataset, "entame", other, of)
        for group in groups
        for model, dataset in group.cells
    }
    return {
        cell: comparison
        for cell, comparison in found.items()
        if comparison is not None and comparison.n >= LEAST_SEEDS
    }


def _cell(group: Group, model: str, dataset: str) -> str:
    return f"{model} {dataset}" + (f" ({group.title})" if group.title else "")


def _count(claim: str, found: dict[str, Comparison], holds: Callable[[Comparison], bool]) -> str:
    if not found:
        return f"{claim}: {UNTESTED}."
    failing = [f"{cell} {difference(it)}{p_value(it.p)}" for cell, it in found.items() if not holds(it)]
    named = f" Not with {'; '.join(failing)}." if failing else ""
    return f"{claim}, in **{len(found) - len(failing)} of {len(found)}** cells.{named}"


def _standing(found: dict[str, Comparison], named: bool = True) -> str:
    """Count the cells where ENTAME is ahead, behind and neither, and name those where it is not ahead."""
    if not found:
        return UNTESTED
    by_side: dict[str, list[str]] = {AHEAD: [], BEHIND: [], UNDECIDED: []}
    for (cell, it), side in zip(found.items(), sides([*found.values()]), strict=True):
        by_side[side].append(f"{cell} {difference(it)}")
    parts = [f"{AHEAD} in **{len(by_side.pop(AHEAD))} of {len(found)}** cells"]
    for side, cells in by_side.items():
        parts.append(f"{side} in {len(cells)}" + (f" ({', '.join(cells)})" if named and cells else ""))
    return ", ".join(parts)


def _won(groups: Iterable[Group]) -> dict[str, list[str]]:
    """Name, by the method with the highest mean, the cells that ENTAME and another method ran."""
    won: dict[str, list[str]] = {}
    for group in groups:
        for model, dataset in group.cells:
            found = {method: summary(group.values(model, dataset, method, final).values()) for method in group.methods}
            means = {method: it.mean for method, it in found.items() if it is not None}
            if "entame" in means and len(means) > 1:
                best = max(means, key=lambda method: means[method])
                won.setdefault(best, []).append(_cell(group, model, dataset))
    return won


def _names(runs: Iterable[Run]) -> set[str]:
    return {name for run in runs for name in run.versions}


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values) - {""}, key=natural)) or "unknown"
