"""Find images that are in two splits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .dataset import ClassificationDataset


class Duplicates(NamedTuple):
    """Count the images of one split whose files equal files of another.

    Attributes:
        images (`int`): how many they are.
        other_labels (`int`): how many of them have another label there.
        examples (`list[tuple[str, str]]`): the names of the first five, in both splits.
    """

    images: int
    other_labels: int
    examples: list[tuple[str, str]]


def find_duplicates(split: ClassificationDataset, other: ClassificationDataset) -> Duplicates:
    """Find the images of a split whose files equal files of another, byte by byte.

    The hashes are those that the cache keeps of the images that were decoded: images that are not cached yet are not
    compared.

    Args:
        split ([`ClassificationDataset`]): the split whose images are counted, such as the validation split.
        other ([`ClassificationDataset`]): the split to compare with, such as the training split.

    Returns:
        [`Duplicates`]: how many there are, and examples.
    """
    own, others = split.content_hashes(), other.content_hashes()
    order = np.argsort(others)
    found = order[np.searchsorted(others, own, sorter=order).clip(max=len(others) - 1)]
    rows = np.flatnonzero((own != 0) & (others[found] == own))
    matches = found[rows]
    return Duplicates(
        len(rows),
        int((split.labels[rows] != other.labels[matches]).sum()),
        [
            (split.describe(int(row)), other.describe(int(match)))
            for row, match in zip(rows[:5], matches, strict=False)
        ],
    )
