"""Paired comparisons over seeds or over combinations: differences, confidence intervals, tests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

# Accuracies are counts, so two seeds often have the same difference by chance and would seem certain.
LEAST_SEEDS = 3
# One number a seed, or one a combination of model and dataset.
Values = Mapping[Any, float]


class Comparison(NamedTuple):
    """Compare two methods over what both ran.

    Args:
        difference (`float`): Mean of first − second.
        margin (`float`): Half the width of its 95 % confidence interval by the t distribution; NaN for n < 3.
        p (`float`): P-value of the two-sided paired t-test; NaN for n < 3.
        error (`float`): Standard error of the difference; NaN for n = 1.
        median (`float`): Median of first − second.
        n (`int`): Number of pairs.
    """

    difference: float
    margin: float
    p: float
    error: float
    median: float
    n: int


def paired(first: Values, second: Values | None = None) -> Comparison | None:
    """Compare two methods key by key; without a second one, compare with zero.

    Args:
        first, second (`dict` of `float`): One number a key. Keys that only one of them has are left out.

    Returns:
        [`Comparison`] or `None`: `None` if no key is shared. If all differences are equal, p is 1 for zero and 0
        otherwise.
    """
    if second is None:
        second = dict.fromkeys(first, 0.0)
    differences = np.array([first[key] - second[key] for key in first if key in second])
    n = len(differences)
    if not n:
        return None
    mean, median = float(differences.mean()), float(np.median(differences))
    error = float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    if n < LEAST_SEEDS:
        return Comparison(mean, math.nan, math.nan, error, median, n)
    # Accuracies are counts over the same images: smaller differences are rounding.
    if error < 1e-12:
        return Comparison(mean, 0.0, float(abs(mean) < 1e-12), 0.0, median, n)
    margin = float(stats.t.ppf(0.975, n - 1)) * error
    return Comparison(mean, margin, float(2 * stats.t.sf(abs(mean) / error, n - 1)), error, median, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number by Holm's step-down method, which is valid under any dependence."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def within_one_error(best: Values, other: Values) -> bool:
    """Return whether a method is at or above another, within one standard error of their paired difference."""
    comparison = paired(other, best)
    return comparison is not None and comparison.difference >= -(comparison.error if comparison.n > 1 else 0.0) - 1e-12
