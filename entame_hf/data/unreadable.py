"""Count images that cannot be read, name them with the reason, and find images to stand in for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..errors import InputError, printable
from .augmentation import Rows
from .skipped import SkippedImage

logger = logging.getLogger(__name__)

MAX_UNREADABLE_FRACTION = 0.01

# So many are skipped in the smallest dataset.
_FEW = 5

_NAMED = 5


class UnreadableDataError(InputError):
    """Report that too many images cannot be read.

    A DataLoader raises a worker's error again with the traceback in its message; only the last line is kept.
    """

    def __init__(self, message: str):
        super().__init__(message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip())


def check_unreadable(
    summary: str | None, unreadable: int, total: int, of_class: int, class_total: int, class_name: str, example: str
) -> None:
    """Stop a run that loses too many images.

    Args:
        summary (`str`): names the unreadable images.
        unreadable, total (`int`): how many images are unreadable, of how many.
        of_class, class_total (`int`): the same for the class of the latest.
        class_name (`str`): that class.
        example (`str`): the latest, with its reason.

    Raises:
        InputError: If they are more than 1 % and more than 5, or more than half of the class.
    """
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


def summarise(count: int, names: Iterable[str], total: int | None = None) -> str | None:
    """Count the unreadable images and name the first ones, in one line; `None` if there are none."""
    if not count:
        return None
    of = "" if total is None else f" of {total:,}"
    shown = [printable(name) for name in islice(names, _NAMED)] + ["..."] * (count > _NAMED)
    return f"{count:,}{of} images could not be read and were skipped: {', '.join(shown)}"


class UnreadableRows:
    """Flag the unreadable rows of a dataset, in memory that all processes of the machine share.

    Args:
        labels (`torch.Tensor`): int64 (N,), the class of each row.
        class_names (sequence of `str`): by class.
        describe (`Callable`): returns the name of a row for messages.
        reason (`Callable`): returns the reason why a row is unreadable, if another process found it.
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

    def add(self, row: int, error: Exception) -> None:
        """Flag a row, and name it in a warning the first time.

        Raises:
            InputError: If more than 1 % of all images, and more than 5, or most images of a class are unreadable.
        """
        if self.flags[row]:
            return
        self.flags[row] = True
        self._reasons[row] = str(error)
        logger.warning("Skipping an image that cannot be read: %s (%s)", *map(printable, (self._describe(row), error)))
        label = self._labels[row]
        own = self.flags[self._labels == label]
        check_unreadable(
            self.summary(),
            int(self.flags.sum()),
            len(self.flags),
            int(own.sum()),
            len(own),
            self._class_names[int(label)],
            f"{self._describe(row)} ({error})",
        )

    def gather(self) -> None:
        """Add what other processes could not read. To be called in all of them."""
        for row, reason in gather_object(list(self._found())):
            self.flags[row] = True
            self._reasons[row] = reason

    def replace(self, rows: Rows) -> Rows:
        """Return the rows, each flagged one replaced by the next that is not.

        Raises:
            InputError: If all are flagged.
        """
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
        rows = self.flags.nonzero().flatten().tolist()
        return summarise(len(rows), map(self._describe, rows), len(self.flags))

    def skipped(self, split: str) -> list[SkippedImage]:
        """List the flagged rows with their reasons."""
        return [SkippedImage(self._describe(row), split, reason) for row, reason in self._found()]

    def _found(self) -> list[tuple[int, str]]:
        rows = self.flags.nonzero().flatten().tolist()
        return [(row, self._reasons.get(row) or self._reason(row)) for row in rows]
