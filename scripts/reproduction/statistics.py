"""What several seeds say: means with their spread, paired comparisons, and the steps that an accuracy took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

# Accuracies are counts: that two seeds have the same difference, and so leave no doubt, happens.
LEAST_SEEDS = 3
# One number a seed, or whatever else makes two numbers a pair.
Values = Mapping[Any, float]


class Summary(NamedTuple):
    """Mean of n values, and half the width of its 95 % confidence interval by the t distribution; NaN below three."""

    mean: float
    margin: float
    n: int


def summary(values: Iterable[float]) -> Summary | None:
    """Summarise values; None where there are none."""
    array = np.array(list(values))
    n = len(array)
    if not n:
        return None
    error = float(array.std(ddof=1)) / math.sqrt(n) if n >= LEAST_SEEDS else math.nan
    return Summary(float(array.mean()), _margin(error, n), n)


class Comparison(NamedTuple):
    """Compare two methods over the seeds that both ran.

    Args:
        difference (`float`): the mean of first − second.
        margin (`float`): half the width of its 95 % confidence interval by the t distribution; NaN below three seeds.
        p (`float`): of the two-sided paired t-test; NaN below three seeds.
        error (`float`): the standard error of the difference; NaN for one seed.
        n (`int`): the number of seeds that both ran.
    """

    difference: float
    margin: float
    p: float
    error: float
    n: int


def paired(first: Values, second: Values) -> Comparison | None:
    """Compare two methods seed by seed.

    Args:
        first, second (`dict` of `float`): one number a seed; seeds that only one has are left out.

    Returns:
        [`Comparison`] or `None`: they share no seed. Where every seed has the same difference, there is nothing to
        doubt: p is 1 if it is zero and 0 if it is not.

    Example:

    ```python
    >>> paired({0: 3.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0}).difference
    2.0
    ```
    """
    differences = np.array([first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())])
    n = len(differences)
    if not n:
        return None
    mean = float(differences.mean())
    if n == 1:
        return Comparison(mean, math.nan, math.nan, math.nan, 1)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    if n < LEAST_SEEDS:
        return Comparison(mean, math.nan, math.nan, error, n)
    # Accuracies are counts over the same images: what differs by less is rounding.
    if error < 1e-12:
        return Comparison(mean, 0.0, float(abs(mean) < 1e-12), 0.0, n)
    p = 2 * stats.t.sf(abs(mean) / error, n - 1)
    return Comparison(mean, _margin(error, n), float(p), error, n)


def _margin(error: float, n: int) -> float:
    return float(stats.t.ppf(0.975, n - 1)) * error


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number: Holm's step-down method, valid however they depend on each other.

    Example:

    ```python
    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    ```
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def within_one_error(best: Values, other: Values) -> bool:
    """Tell whether a method is at or above another one, within one standard error of their paired difference."""
    comparison = paired(other, best)
    return comparison is not None and comparison.difference >= -(comparison.error if comparison.n > 1 else 0.0) - 1e-12


def steps_to_reach(accuracies: Mapping[int, float], level: float) -> float:
    """Find the first evaluated step at which an accuracy is reached; infinite where it never is.

    Nothing is interpolated: between two evaluations the level may have been reached earlier, so this errs against the
    method that is measured.
    """
    return min((step for step, accuracy in accuracies.items() if accuracy >= level), default=math.inf)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Get the quartiles of values that may be infinite; of two values that are as near, the larger one."""
    low, middle, high = np.quantile(np.array(values, dtype=float), (0.25, 0.5, 0.75), method="higher")
    return float(low), float(middle), float(high)
