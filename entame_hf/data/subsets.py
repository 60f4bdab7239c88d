"""Choose rows of a table by their classes: set aside, limited, or so many a class."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

Codes = NDArray[np.int64]


def hold_out(codes: Codes, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Choose a fraction of each class to set aside: at least one image of a class, and at most all but one.

    Args:
        codes (`numpy.ndarray`): int64 (N,), class indices.
        fraction (`float`): in (0, 1).
        seed (`int`): decides the draw.

    Returns:
        `numpy.ndarray`: bool (N,), the rows set aside.
    """
    # scikit-learn's stratified split refuses classes of one image and may leave small ones out of a split.
    generator = np.random.default_rng(seed)
    chosen = np.zeros(len(codes), dtype=bool)
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        count = np.clip(round(len(rows) * fraction), 1, len(rows) - 1) if len(rows) > 1 else 0
        chosen[generator.permutation(rows)[:count]] = True
    return chosen


def draw(codes: Codes, limit: int, seed: int, parameter: str) -> NDArray[np.int64]:
    """Choose a number of rows, of each class in proportion and at least one.

    Args:
        codes (`numpy.ndarray`): int64 (N,), class indices.
        limit (`int`): how many rows.
        seed (`int`): decides the draw.
        parameter (`str`): what messages call the limit.

    Returns:
        `numpy.ndarray`: int64 (limit,), the rows in ascending order; all rows if there are no more.

    Raises:
        InputError: If there are more classes than rows to choose.
    """
    if limit >= len(codes):
        return np.arange(len(codes))
    classes, counts = np.unique(codes, return_counts=True)
    check_limit(limit, len(classes), parameter)
    # One a class first; the others by largest remainder.
    exact = (limit - len(classes)) * (counts - 1) / max(1, len(codes) - len(classes))
    quota = 1 + exact.astype(np.int64)
    rest = limit - int(quota.sum())
    quota[np.argsort(exact.astype(np.int64) - exact, kind="stable")[:rest]] += 1
    generator = np.random.default_rng(seed)
    rows = [
        generator.permutation(np.flatnonzero(codes == code))[:count]
        for code, count in zip(classes, quota, strict=True)
    ]
    return np.sort(np.concatenate(rows))


def check_limit(limit: int, classes: int, parameter: str) -> None:
    """Refuse fewer images than classes."""
    if limit < classes:
        raise InputError(
            f"`{parameter}={limit}` is fewer than the {classes:,} classes, so that some have no image. Give "
            f"`{parameter}={classes}` or more, or leave it out."
        )


def few_of_each(codes: Codes, count: int, seed: int) -> NDArray[np.int64]:
    """Choose a number of rows of each class, or all of a class that has no more.

    Args:
        codes (`numpy.ndarray`): int64 (N,), class indices.
        count (`int`): rows a class.
        seed (`int`): decides the draw.

    Returns:
        `numpy.ndarray`: int64, the rows in ascending order.
    """
    generator = np.random.default_rng(seed)
    rows = [generator.permutation(np.flatnonzero(codes == code))[:count] for code in np.unique(codes)]
    return np.sort(np.concatenate(rows))
