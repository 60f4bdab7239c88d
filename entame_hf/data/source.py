"""What a loader finds, before splits, columns and labels are chosen, and the images that are left out."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import NamedTuple, TypeAlias

from datasets import Dataset, IterableDataset

from ..errors import printable
from ..files import write_text

Rows: TypeAlias = Dataset | IterableDataset
SKIPPED_FILE = "skipped_images.csv"

# More images are left out as a count.
MAX_NAMED = 100_000


class SkippedImage(NamedTuple):
    """Name an image that is not used, the split it belongs to, if any, and why."""

    image: str
    split: str
    reason: str


@dataclass
class Source:
    """Hold the splits that a loader found, by the names that the user knows, and how they lie there.

    `notes` say what is left out, with counts, one sentence each; `skipped` names these images; `split_column` is what
    the user calls the column "split".
    """

    splits: dict[str, Rows]
    layout: str
    notes: list[str] = field(default_factory=list)
    skipped: list[SkippedImage] = field(default_factory=list)
    split_column: str | None = None

    def leave_out(self, images: Sequence[str], split: str, reason: str, where: str) -> None:
        """Leave images out, and say how many."""
        if not images:
            return
        size = count_of(len(images), "image")
        self.notes.append(f"{size} of {where} left out: {reason}.")
        named = images if len(images) <= MAX_NAMED else [f"{size}, too many to name"]
        self.skipped += [SkippedImage(image, split, reason) for image in named]


def count_of(count: float, noun: str, form: str = ",") -> str:
    """Write a count with its noun: 1 image, 1,200 classes, 0.5 epochs."""
    written, plural = f"{count:{form}}", noun + ("es" if noun.endswith("s") else "s")
    return f"{written} {noun if written == '1' else plural}"


def listed(names: Iterable[object]) -> str:
    """Write names in a message, not all of very many."""
    text = ", ".join(map(printable, names))
    return text if len(text) <= 200 else f"{text[:190].rpartition(', ')[0] or text[:190]}, ..."


def write_skipped_images(folder: str | os.PathLike[str], skipped: Iterable[SkippedImage]) -> Path | None:
    """Write which images are not used, and why; `None`, and no file, where every image is used."""
    path = Path(folder) / SKIPPED_FILE
    rows = list(dict.fromkeys(skipped))
    if not rows:
        path.unlink(missing_ok=True)
        return None
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(SkippedImage._fields)
    writer.writerows([printable(value) for value in row] for row in rows)
    write_text(path, text.getvalue())
    return path
