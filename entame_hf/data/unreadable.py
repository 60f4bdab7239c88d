"""Count images that cannot be read, name them with the reason, and find images to stand in for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers.utils import logging

from ..errors import InputError, printable
from .augmentation import Rows
from .source import SkippedImage

logger = logging.get_logger(__name__)
MAX_UNREADABLE_FRACTION = 0.01

# So many are skipped in the smallest dataset.
_FEW = 5
_NAMED = 5

# A stream, and a class of it, count as so many images until more were read.
_LEAST, _LEAST_OF_CLASS = 2000, 10


class UnreadableDataError(InputError):
    """Report that too many images cannot be read.

    A DataLoader raises a worker's error again with the traceback in its message; only the last line is kept.
    """

    def __init__(self, message: str):
        super().__init__(message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip())


def _check(
    summary: str | None, unreadable: int, total: int, of_class: int, class_total: int, class_name: str, example: str
) -> None:
    """Stop a run if more than 1 % of all images, and more than 5, or more than half of a class are unreadable."""
    if unreadable > max(_FEW, MAX_UNREADABLE_FRACTION * total):
        raise UnreadableDataError(
            f"{summary}. At most {MAX_UNREADABLE_FRACTION:.0%}, or {_FEW} of a small dataset, may be: repair or "
            "remove them."
        )
    if 2 * of_class > class_total:
        raise UnreadableDataError(
            f"{of_class:,} of {class_total:,} images of class {class_name!r} cannot be read, such as {example}. At "
            "most half may be: repair them, or remove the class."
        )


def _summarise(count: int, names: Iterable[str], total: int | None = None) -> str | None:
    if not count:
        return None
    of = "" if total is None else f" of {total:,}"
    shown = [printable(name) for name in islice(names, _NAMED)] + ["..."] * (count > _NAMED)
    return f"{count:,}{of} images could not be read and were skipped: {', '.join(shown)}"


def _warn(name: str, reason: object) -> None:
    logger.warning(f"Skipping an image that cannot be read: {printable(name)} ({printable(reason)})")


class UnreadableRows:
    """Flag the unreadable rows of a dataset, in memory that all processes of the machine share.

    `describe` names a row; `reason` finds why one is unreadable that another process found.
    """

    def __init__(
        self,
        labels: Tensor,
        class_names: Sequence[str],
        describe: Callable[[int], str],
        reason: Callable[[int], str],
    ):
        self.flags = torch.zeros(len(labels), dtype=torch.bool).share_memory_()
        self._labels, self._class_names, self._describe, self._reason = labels, class_names, describe, reason
        self._reasons: dict[int, str] = {}

    def add(self, row: int, reason: object) -> None:
        """Flag a row, and name it in a warning the first time; refuse to lose too many."""
        if self._flag(row, reason):
            self._check(row)

    def gather(self) -> None:
        """Add what other ranks could not read, and count for the whole job. To be called in all of them."""
        for row, reason in gather_object(list(self._found())):
            self._flag(row, reason)
        # One of each class.
        for row in {int(self._labels[row]): row for row in self._rows()}.values():
            self._check(row)

    def replace(self, rows: Rows) -> Rows:
        """Return the rows, each flagged one replaced by the next that is not."""
        flags = self.flags.numpy()
        if not flags[rows].any():
            return rows
        if flags.all():
            raise UnreadableDataError(f"{self.summary()}. Repair them.")
        rows = rows.copy()
        while (flagged := flags[rows]).any():
            rows[flagged] = (rows[flagged] + 1) % len(flags)
        return rows

    def summary(self) -> str | None:
        """Name the flagged rows in one line; `None` if there are none."""
        rows = self._rows()
        return _summarise(len(rows), map(self._describe, rows), len(self.flags))

    def skipped(self, split: str) -> list[SkippedImage]:
        """List the flagged rows with their reasons."""
        return [SkippedImage(self._describe(row), split, reason) for row, reason in self._found()]

    def _rows(self) -> list[int]:
        return self.flags.nonzero().flatten().tolist()

    def _found(self) -> list[tuple[int, str]]:
        return [(row, self._reasons.get(row) or self._reason(row)) for row in self._rows()]

    def _flag(self, row: int, reason: object) -> bool:
        if self.flags[row]:
            return False
        self.flags[row] = True
        self._reasons[row] = str(reason)
        _warn(self._describe(row), reason)
        return True

    def _check(self, row: int) -> None:
        label = self._labels[row]
        own = self.flags[self._labels == label]
        example = f"{self._describe(row)} ({self._reasons.get(row)})"
        class_name = self._class_names[int(label)]
        _check(self.summary(), int(self.flags.sum()), len(self.flags), int(own.sum()), len(own), class_name, example)


class UnreadableNames:
    """Count the images of a stream, and name the unreadable ones."""

    def __init__(self, classes: int):
        self.reasons: dict[str, str] = {}
        # Images of each class that were read, and those of them that were unreadable; of other ranks as last gathered.
        self._counts = np.zeros((2, classes), np.int64)
        self._others = self._counts.copy()
        self._labels: dict[str, int] = {}

    def count(self, labels: Tensor) -> None:
        """Count images that are read."""
        self._counts[0] += np.bincount(labels, minlength=self._counts.shape[1])

    def add(self, name: str, label: int, reason: object) -> None:
        """Note an image, and name it in a warning the first time; refuse to lose too many."""
        if name not in self.reasons:
            self._counts[1, label] += 1
            self._note(name, label, reason)
            self._check(name)

    def gather(self) -> None:
        """Add what other ranks could not read, and count for the whole job. To be called in all of them."""
        parts = gather_object([(self._counts, self.reasons, self._labels)])
        self._others = sum(counts for counts, _, _ in parts) - self._counts
        for _, reasons, labels in parts:
            for name in reasons.keys() - self.reasons.keys():
                self._note(name, labels[name], reasons[name])
        for name in {label: name for name, label in sorted(self._labels.items())}.values():
            self._check(name)

    def summary(self) -> str | None:
        """Name the unreadable images in one line; `None` if there are none."""
        return _summarise(len(self.reasons), self.reasons)

    def skipped(self, split: str) -> list[SkippedImage]:
        """List the unreadable images with their reasons."""
        return [SkippedImage(image, split, reason) for image, reason in self.reasons.items()]

    def _note(self, name: str, label: int, reason: object) -> None:
        self.reasons[name], self._labels[name] = str(reason), label
        _warn(name, reason)

    def _check(self, name: str) -> None:
        counts, label = self._counts + self._others, self._labels[name]
        total, of_class = max(int(counts[0].sum()), _LEAST), max(int(counts[0, label]), _LEAST_OF_CLASS)
        example = f"{name} ({self.reasons[name]})"
        _check(self.summary(), len(self.reasons), total, int(counts[1, label]), of_class, str(label), example)
