"""What a loader finds, before splits, columns and labels are chosen: the same for folders, files and streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from datasets import Dataset, IterableDataset

from .skipped import SkippedImage

Rows: TypeAlias = Dataset | IterableDataset


@dataclass
class Source:
    """Hold the splits that a loader found.

    Attributes:
        splits (`dict[str, datasets.Dataset | datasets.IterableDataset]`): by the names that the user knows.
        layout (`str`): how they lie there, in a few words.
        notes (`list[str]`): what is left out, with counts; one sentence each.
        skipped (`list[SkippedImage]`): the images that are left out.
    """

    splits: dict[str, Rows]
    layout: str
    notes: list[str] = field(default_factory=list)
    skipped: list[SkippedImage] = field(default_factory=list)

    def leave_out(self, paths: list[str], split: str, reason: str, where: str) -> None:
        """Leave images out, and say how many."""
        if paths:
            self.notes.append(f"{count_of(len(paths), 'image')} of {where} left out: {reason}.")
            self.skipped += [SkippedImage(path, split, reason) for path in paths]


def count_of(count: int, noun: str) -> str:
    """Write a count with its noun.

    Example:

    ```python
    >>> count_of(1, "image"), count_of(1200, "class")
    ('1 image', '1,200 classes')
    ```
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {noun if count == 1 else plural}"
