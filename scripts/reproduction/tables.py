"""The paper's tables, and what stands below them, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .runs import PAPER, Group, Run, name_of
from .statistics import (
    LEAST_SEEDS,
    Comparison,
    Values,
    holm,
    paired,
    quartiles,
    steps_to_reach,
    summary,
    within_one_error,
)

MISSING = "–"
# The paper's tables of converged accuracies, by data set, and their columns, by method.
CONVERGED = {"CIFAR10": "cifar10_acc", "CIFAR100": "cifar100_acc", "Caltech101": "caltech101_acc"}
COLUMNS = {"base": "Base", "base_wu": "Base+WU", "mei": "MEI", "entame": "MEI+FN"}
REFERENCES = ("base", "keep")
SIGNIFICANT = 0.05
# Where ENTAME is beside another method.
AHEAD, BEHIND, UNDECIDED = "ahead", "behind", "not told apart"
# What is compared of two runs, in percent; None where it was not measured.
Measure = Callable[[Run], float | None]


def final(run: Run) -> float:
    return 100 * run.final


def early(run: Run) -> float | None:
    return None if run.early is None else 100 * run.early


def noise_share(run: Run) -> float | None:
    return None if run.noise_share is None else 100 * run.noise_share


def noise_table(group: Group) -> str:
    """The noise share of Base's first error."""

    def cell(model: str, dataset: str) -> str:
        return spread(group.values(model, dataset, "base", noise_share)) + _paper("init_noise_regular", model, dataset)

    return _by_model_and_dataset(group, cell)


def gain_table(group: Group) -> str:
    """What ENTAME gains over Base in the mean accuracy of the first steps, seed by seed."""

    def cell(model: str, dataset: str) -> str:
        gain = compare(group, model, dataset, "entame", "base", early)
        ours = MISSING if gain is None else tested(gain)
        return ours + _paper("speedup", model, dataset)

    return _by_model_and_dataset(group, cell)


def accuracy_table(group: Group, dataset: str, of: Measure) -> str:
    """The accuracy, early or at the end, of the runs on one data set, the best in bold."""
    papers = CONVERGED.get(dataset, "") if of is final else ""
    rows = []
    for model in group.models:
        values = {method: group.values(model, dataset, method, of) for method in group.methods}
        compared = [found for found in values.values() if found]
        best = max(compared, key=mean, default={})
        cells = []
        for method, found in values.items():
            bold = "**" if len(compared) > 1 and found and (found is best or within_one_error(best, found)) else ""
            cells.append(spread(found, bold) + _paper(papers, model, COLUMNS.get(method, "")))
        rows.append([model, *cells])
    return markdown([dataset, *map(name_of, group.methods)], rows)


def verdicts(group: Group, dataset: str, of: Measure) -> list[str]:
    """Say where ENTAME is above or below another method, by paired t-tests with Holm's correction."""
    found = []
    for method in (method for method in group.methods if method != "entame"):
        for model in group.models:
            comparison = compare(group, model, dataset, "entame", method, of)
            if comparison is not None and comparison.n >= LEAST_SEEDS:
                found.append((method, model, comparison))
    said: dict[str, dict[str, list[str]]] = {BEHIND: {}, AHEAD: {}, UNDECIDED: {}}
    for (method, model, comparison), side in zip(found, sides([it for _, _, it in found]), strict=True):
        said[side].setdefault(name_of(method), []).append(f"{model} {difference(comparison)}")
    others = {BEHIND: "Above ENTAME", AHEAD: "Below ENTAME", UNDECIDED: "Not told apart from ENTAME"}
    lines = []
    for side, methods in said.items() if found else ():
        text = "; ".join(f"**{name}** ({', '.join(cells)})" for name, cells in methods.items())
        lines.append(f"{others[side]}: {text or 'none'}.")
    return lines


def sides(comparisons: Sequence[Comparison]) -> list[str]:
    """Tell for each of several comparisons of ENTAME on which side it is, with Holm's correction over all of them."""
    adjusted = holm([it.p for it in comparisons])
    return [
        UNDECIDED if p >= SIGNIFICANT else AHEAD if it.difference > 0 else BEHIND
        for it, p in zip(comparisons, adjusted, strict=True)
    ]


def steps_table(group: Group) -> str:
    """The steps that ENTAME takes to the accuracy at which others end, over the steps that those took."""
    references = [method for method in REFERENCES if method in group.methods]
    rows = []
    for model, dataset in group.cells:
        cells = [_ratio(step_ratios(group, model, dataset, method)) for method in references]
        if any(cell != MISSING for cell in cells):
            rows.append([model, dataset, *cells])
    header = ["", "", *(f"to where {name_of(method)} ends" for method in references)]
    return markdown(header, rows) if rows else ""


def step_ratios(group: Group, model: str, dataset: str, reference: str) -> Values:
    """Get, by seed, the steps to the final accuracy of a method over the steps that it took; infinite where never."""
    others = {run.seed: run for run in group.select(model, dataset, reference)}
    return {
        run.seed: steps_to_reach(run.accuracies, others[run.seed].final) / max(others[run.seed].accuracies)
        for run in group.select(model, dataset, "entame")
        if run.seed in others
    }


def compare(group: Group, model: str, dataset: str, first: str, second: str, of: Measure) -> Comparison | None:
    return paired(group.values(model, dataset, first, of), group.values(model, dataset, second, of))


def difference(comparison: Comparison) -> str:
    """Write a difference in percentage points with its 95 % confidence interval."""
    # Adding zero makes −0.0 that of all tables: 0.0.
    return f"{round(comparison.difference, 1) + 0:+.1f}{_plus_minus(comparison.margin)}".replace("-", "−")


def tested(comparison: Comparison) -> str:
    """Write a difference with its interval, the p-value of its test and the number of pairs."""
    return f"{difference(comparison)}{p_value(comparison.p)} ({comparison.n})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _by_model_and_dataset(group: Group, cell: Callable[[str, str], str]) -> str:
    rows = [[model, *(cell(model, dataset) for dataset in group.datasets)] for model in group.models]
    return markdown(["", *group.datasets], rows)


def mean(values: Values) -> float:
    return sum(values.values()) / len(values)


def spread(values: Values, bold: str = "") -> str:
    """Write the mean of several seeds with its 95 % confidence interval, as the paper does, and their number."""
    found = summary(values.values())
    if found is None:
        return MISSING
    return f"{bold}{found.mean:.1f}{_plus_minus(found.margin)}{bold} ({found.n})"


def _plus_minus(margin: float) -> str:
    return "" if math.isnan(margin) else f" ± {margin:.1f}"


def _paper(table: str, row: str, column: str) -> str:
    known = PAPER.get(table, {}).get(row, {}).get(column)
    return "" if known is None else f"<br><sub>paper {known[0]:.2f} ± {known[1]:.2f}</sub>"


def p_value(p: float) -> str:
    return "" if math.isnan(p) else f", p = {p:.2g}" if p >= 0.001 else f", p = {p:.0e}".replace("e-0", "e-")


def _ratio(ratios: Values) -> str:
    if not ratios:
        return MISSING
    never = sum(math.isinf(ratio) for ratio in ratios.values())
    low, middle, high = (f"{ratio:.2f}" if math.isfinite(ratio) else "∞" for ratio in quartiles([*ratios.values()]))
    missed = f", never in {never}" if never else ""
    return f"{middle} ({low}–{high}; {len(ratios)}{missed})"
