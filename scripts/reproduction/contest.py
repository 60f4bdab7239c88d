"""What counts as success in the contest, decided before it runs: one candidate beside each peer and learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import kendalltau

from .groups import Combination, Group, Measure, Run, final, mean, name_of
from .significance import LEAST_SEEDS, Comparison, holm, paired
from .tables import MISSING, SIGNIFICANT, lead_entry, markdown

# The label of the candidate. `contest_choice` decides its settings, on other models and on validation splits.
CANDIDATE = "informed"
CHOICE, TEST = "contest_choice", "contest"


@dataclass(frozen=True)
class Duel:
    """The candidate beside one peer at one learning rate, in accuracy at the end.

    Args:
        title (`str`): The group's.
        peer (`str`): The peer's method.
        lead (`Comparison`, *optional*): The candidate's lead, paired over combinations; `None` if they share none.
        behind (`list` of `Combination`):
            Where the candidate is behind: paired t-tests over seeds, p < 0.05 after Holm's correction for the number
            of combinations.
        complete (`bool`): Whether both have three or more seeds in common on each combination.
    """

    title: str
    peer: str
    lead: Comparison | None
    behind: list[Combination]
    complete: bool

    @property
    def won(self) -> bool:
        """Return whether the duel is complete, the mean lead is significant, and no combination is behind."""
        ahead = self.lead is not None and self.lead.difference > 0 and self.lead.p < SIGNIFICANT
        return self.complete and ahead and not self.behind


def is_contest(runs: Sequence[Run]) -> bool:
    """Return whether all runs are of suites of the contest, other than the one that chooses the candidate."""
    suites = {str(run.row["suite"]) for run in runs}
    return all(suite.startswith(TEST) and suite != CHOICE for suite in suites)


def duels(groups: Sequence[Group], of: Measure = final) -> Iterator[Duel]:
    """Compare the candidate with each peer in each group, which is a learning rate."""
    for group in groups:
        for peer in group.methods:
            if peer == CANDIDATE:
                continue
            found = {each: group.compare(each, CANDIDATE, peer, of) for each in group.combinations}
            pairs = {each: it for each, it in found.items() if it is not None}
            tested = {each: it for each, it in pairs.items() if it.n >= LEAST_SEEDS}
            adjusted = holm([it.p for it in tested.values()])
            behind = [
                each
                for (each, it), p in zip(tested.items(), adjusted, strict=True)
                if it.difference < 0 and p < SIGNIFICANT
            ]
            lead = paired({each: it.difference for each, it in pairs.items()})
            yield Duel(group.title, peer, lead, behind, len(tested) == len(group.combinations))


def verdict(groups: Sequence[Group], wanted: tuple[int, int] | None) -> str:
    """Say whether the candidate wins all of its duels. One that is lost decides, whatever runs are missing.

    Args:
        groups (`Sequence[Group]`): One a learning rate.
        wanted (`tuple` of two `int`, *optional*):
            The numbers of duels and of combinations that the test has; `None` for another suite.
    """
    found = [*duels(groups)]
    won = sum(duel.won for duel in found)
    said = f"{CANDIDATE} wins {won} of {len(found)} duels"
    if wanted is None:
        if not any(duel.complete for duel in found):
            said = f"None of the {len(found)} duels is complete: each needs {LEAST_SEEDS} seeds"
        return f"{said}. The rule of success is about the suite `{TEST}` alone."
    full = [duel for duel in found if duel.complete and duel.lead is not None and duel.lead.n >= wanted[1]]
    missing = len(full) < max(len(found), wanted[0])
    if not all(duel.won for duel in full):
        counted = f"{sum(duel.won for duel in full)} of {len(full)} duels"
        left = f", and misses runs for {len(found) - len(full)} others" if missing else ""
        return f"**{CANDIDATE} does not succeed: it wins {counted}{left}.**"
    if missing:
        return f"**No verdict yet: {said}, and runs are missing.**"
    return f"**{CANDIDATE} succeeds: it wins all {len(found)} duels.**"


def duel_table(groups: Sequence[Group]) -> str:
    """Show the candidate's lead over each peer: mean, median and p over combinations, and where it is behind."""
    rows = [
        [
            duel.title,
            name_of(duel.peer),
            lead_entry(duel.lead, median=True),
            "; ".join(", ".join(each) for each in duel.behind) or "none",
            "yes" if duel.won else "no" if duel.complete else "runs missing",
        ]
        for duel in duels(groups)
    ]
    return markdown(["", f"{CANDIDATE} over", "lead at the end", "behind", "won"], rows)


def ranking_table(groups: Sequence[Group]) -> str:
    """Show how well the probe and LogME rank models before any training: Kendall's τ, one row a dataset.

    They are compared with the best accuracy of all methods and learning rates on each model. Nothing is shown if no
    dataset has three models with both.
    """
    rows, sums = [], []
    for dataset in dict.fromkeys(dataset for group in groups for dataset in group.datasets):
        scores: dict[str, list[Any]] = {}
        for model in dict.fromkeys(model for group in groups for model in group.models):
            at = (model, dataset)
            told = [_told(groups, at, name) for name in ("probe_accuracy", "logme")]
            ends = [group.values(at, method, final) for group in groups for method in group.methods]
            if any(ends) and None not in told:
                scores[model] = [max(map(mean, filter(None, ends))), *told]
        if len(scores) > 2:
            best, *ranked = zip(*scores.values(), strict=True)
            sums.append([float(kendalltau(best, told).statistic) for told in ranked])
            rows.append([dataset, *(f"{tau:.2f}" for tau in sums[-1]), str(len(scores))])
    if not rows:
        return ""
    rows.append(["mean", *(f"{sum(taus) / len(taus):.2f}" for taus in zip(*sums, strict=True)), ""])
    return markdown(["Kendall's τ", "probe", "LogME", "models"], rows)


def _told(groups: Sequence[Group], at: Combination, name: str) -> float | None:
    runs = (run for group in groups for run in group.select(at, CANDIDATE))
    found = {index: float(run.row[name]) for index, run in enumerate(runs) if run.row.get(name) is not None}
    return mean(found) if found else None


def corruption_table(groups: Sequence[Group]) -> str:
    """Show mean accuracies on the corrupted test splits; nothing without such runs."""
    kinds = sorted({kind for group in groups for run in group.runs for kind in run.row.get("corruption") or ()})
    if not kinds:
        return ""

    def under(wanted: Sequence[str]) -> Measure:
        def of(run: Run) -> float | None:
            pairs = zip(run.row.get("corruption") or (), run.row.get("corruption_accuracy") or (), strict=True)
            values = [100 * accuracy for kind, accuracy in pairs if kind in wanted]
            return sum(values) / len(values) if values else None

        return of

    rows = []
    for group in groups:
        leads = {duel.peer: lead_entry(duel.lead, median=True) for duel in duels([group], under(kinds))}
        for method in group.methods:
            means = (group.means(method, of) for of in (final, *(under([kind]) for kind in kinds)))
            entries = [f"{mean(values):.1f}" if values else MISSING for values in means]
            rows.append([group.title, name_of(method), *entries, leads.get(method, "")])
    return markdown(["", "", "clean", *kinds, f"{CANDIDATE}'s lead, corrupted"], rows)
