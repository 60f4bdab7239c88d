"""Tables of accuracies in Markdown, beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .groups import PAPER, Combination, Group, Measure, early, final, mean, name_of, noise_share
from .significance import LEAST_SEEDS, Comparison, Values, holm, paired, within_one_error

MISSING = "–"
# The paper's tables of final accuracies by dataset, and their columns by method.
CONVERGED = {"CIFAR10": "cifar10_acc", "CIFAR100": "cifar100_acc", "Caltech101": "caltech101_acc"}
COLUMNS = {"base": "Base", "base_wu": "Base+WU", "mei": "MEI", "entame": "MEI+FN"}
SIGNIFICANT = 0.05


def noise_table(group: Group) -> str:
    """Show the noise share of Base's first error."""

    def entry(combination: Combination) -> str:
        values = group.values(combination, "base", noise_share)
        return spread(values) + _paper("init_noise_regular", *combination)

    return _by_model_and_dataset(group, entry)


def gain_table(group: Group) -> str:
    """Show what ENTAME gains over Base in the mean accuracy of the first steps."""

    def entry(combination: Combination) -> str:
        return lead_entry(group.compare(combination, "entame", "base", early)) + _paper("speedup", *combination)

    return _by_model_and_dataset(group, entry)


def accuracy_table(group: Group, dataset: str, of: Measure) -> str:
    """Show the accuracies of all methods on one dataset, with the best in bold."""
    papers = CONVERGED.get(dataset, "") if of is final else ""
    rows = []
    for model in group.models:
        values = {method: group.values((model, dataset), method, of) for method in group.methods}
        compared = [found for found in values.values() if found]
        best = max(compared, key=mean, default={})
        entries = []
        for method, found in values.items():
            bold = "**" if len(compared) > 1 and found and (found is best or within_one_error(best, found)) else ""
            entries.append(spread(found, bold) + _paper(papers, model, COLUMNS.get(method, "")))
        rows.append([model, *entries])
    return markdown([dataset, *map(name_of, group.methods)], rows)


def entame_table(group: Group) -> str:
    """Compare ENTAME with each other method, over the first ten steps and at the end: one row a method.

    A lead is the range of ENTAME's mean lead over combinations. "Ahead", "behind" and "neither" count combinations by
    paired t-tests over seeds with Holm's correction; combinations with fewer than three seeds of both do not count.
    """
    rows = []
    for method in sorted(group.methods, key=lambda method: _overall(group, method, final)):
        row = [name_of(method)]
        for of in (early, final):
            row.append(f"{_overall(group, method, of):.1f}")
            found = {each: group.compare(each, "entame", method, of) for each in group.combinations}
            compared = {each: it for each, it in found.items() if it is not None}
            row += ["", ""] if method == "entame" else [_range(compared.values()), _sides(compared.values())]
        rows.append(row)
    header = ["first 10 steps", "ENTAME's lead", "ahead, behind, neither"]
    return markdown(["", *header, "at the end", *header[1:]], rows)


def _overall(group: Group, method: str, of: Measure) -> float:
    means = group.means(method, of)
    return mean(means) if means else math.nan


def _range(compared: Iterable[Comparison]) -> str:
    leads = [it.difference for it in compared]
    return f"{signed(min(leads))} to {signed(max(leads))}" if leads else MISSING


def _sides(compared: Iterable[Comparison]) -> str:
    found = [it for it in compared if it.n >= LEAST_SEEDS]
    sides = [
        2 if p >= SIGNIFICANT else int(it.difference < 0)
        for it, p in zip(found, holm([it.p for it in found]), strict=True)
    ]
    return ", ".join(str(sides.count(side)) for side in range(3)) if found else MISSING


def signed(number: float) -> str:
    # Adding zero turns −0.0 into 0.0.
    return f"{round(number, 1) + 0:+.1f}".replace("-", "−")


def difference(comparison: Comparison) -> str:
    """Write a difference in percentage points with its 95 % confidence interval."""
    return signed(comparison.difference) + _plus_minus(comparison.margin)


def lead_entry(comparison: Comparison | None, median: bool = False) -> str:
    """Write a difference with its interval, its median where asked, its p-value and the number of pairs."""
    if comparison is None:
        return MISSING
    middle = f", median {signed(comparison.median)}" if median else ""
    return f"{difference(comparison)}{middle}{p_value(comparison.p)} ({comparison.n})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(entry.replace('|', '&#124;') for entry in line)} |" for line in lines)


def spread(values: Values, bold: str = "") -> str:
    """Write the mean over seeds with its 95 % confidence interval, as the paper does, and the number of seeds."""
    found = paired(values)
    if found is None:
        return MISSING
    return f"{bold}{found.difference:.1f}{_plus_minus(found.margin)}{bold} ({found.n})"


def p_value(p: float) -> str:
    return "" if math.isnan(p) else f", p = {p:.2g}" if p >= 0.001 else f", p = {p:.0e}".replace("e-0", "e-")


def _by_model_and_dataset(group: Group, entry: Callable[[Combination], str]) -> str:
    rows = [[model, *(entry((model, dataset)) for dataset in group.datasets)] for model in group.models]
    return markdown(["", *group.datasets], rows)


def _plus_minus(margin: float) -> str:
    return "" if math.isnan(margin) else f" ± {margin:.1f}"


def _paper(table: str, row: str, column: str) -> str:
    known = PAPER.get(table, {}).get(row, {}).get(column)
    return "" if known is None else f"<br><sub>paper {known[0]:.2f} ± {known[1]:.2f}</sub>"
