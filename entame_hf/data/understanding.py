"""Say how a dataset was understood: its splits, its classes and the images of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from ..errors import printable
from .columns import label_indices
from .names import code_points, joined, same_looks, seems_missing, similar_looks
from .source import Rows, Source, count_of, listed

# So many classes are written one by one.
_FEW = 12


@dataclass
class SplitFacts:
    """Hold the role of a split, where its rows come from, and its images a class, `None` for a stream."""

    role: str
    origin: str
    counts: NDArray[np.int64] | None

    def __str__(self) -> str:
        size = "a stream" if self.counts is None else f"{int(self.counts.sum()):,}"
        return f"{self.role} {size} ({self.origin})"


@dataclass
class Understanding:
    """Hold how a dataset was understood, for `entame inspect`, a training and a model card alike."""

    layout: str = ""
    splits: list[SplitFacts] = field(default_factory=list)
    class_names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Write three lines, on splits, classes and images a class, and a line a note."""
        return "\n".join(printable(line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"Splits: {', '.join(map(str, self.splits))}; read as {self.layout}."
        yield f"Classes: {len(self.class_names):,}: {listed(name or repr('') for name in self.class_names)}."
        yield f"Images a class in train: {self._counts()}."
        for note in self.notes:
            yield f"Note: {note}"

    def _counts(self) -> str:
        counts = self.splits[0].counts if self.splits else None
        if counts is None:
            return "not known of a stream"
        if len(counts) <= _FEW:
            return ", ".join(f"{name or repr('')} {n:,}" for name, n in zip(self.class_names, counts, strict=True))
        low, high = int(counts.argmin()), int(counts.argmax())
        return (
            f"{counts[low]:,} ({self.class_names[low]}) to {counts[high]:,} ({self.class_names[high]}), median "
            f"{np.median(counts):,.0f}"
        )


def understand(
    source: Source, origins: dict[str, str], parts: Mapping[str, Rows], label_column: str, class_names: list[str]
) -> Understanding:
    """Say what there is in splits whose labels are class indices, by role."""

    def count(rows: Rows) -> NDArray[np.int64] | None:
        known = isinstance(rows, Dataset)
        return np.bincount(label_indices(rows, label_column), minlength=len(class_names)) if known else None

    facts = [SplitFacts(role, origins[role], count(rows)) for role, rows in parts.items()]
    counts = facts[0].counts
    notes = [*dict.fromkeys(source.notes), *odd_classes(class_names, counts)]
    if counts is not None and (empty := int((counts == 0).sum())):
        notes.append(f"{empty:,} of {count_of(len(counts), 'class')} have no image to train on.")
    return Understanding(source.layout, facts, class_names, notes)


def odd_classes(names: list[str], counts: NDArray[np.int64] | None) -> Iterator[str]:
    """Name the classes that may be a mistake: missing labels read as text, and names that look alike."""

    def size(name: str) -> str:
        return "" if counts is None else f", {count_of(int(counts[names.index(name)]), 'image')}"

    for name in filter(seems_missing, names):
        yield f"class {name!r}{size(name)}, is taken for a class and may be a missing label."
    for name in names:
        if name != name.strip():
            yield f"class {name!r}{size(name)}, begins or ends with a space."
    if several := joined(names):
        yield (
            f"{count_of(len(several), 'class')} may be several labels an image, such as {several[0]!r}: each is "
            "trained as a class of its own."
        )
    for group in [*same_looks(names), *similar_looks(names)]:
        yield f"classes look alike: {', '.join(code_points(name) + size(name) for name in group[:4])}."
