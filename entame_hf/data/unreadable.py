"""Keep count of images that can't be read, and find others to stand in for them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from accelerate.utils import gather_object

from ..errors import InputError
from .augmentation import Rows

logger = logging.getLogger(__name__)

MAX_UNREADABLE_SHARE = 0.01

# A few are named and skipped in the smallest dataset.
_FEW = 5

LIMIT = f"{MAX_UNREADABLE_SHARE:.0%}, or {_FEW} of a small dataset,"

_NAMED = 5


def too_many(unreadable: int, of: int) -> bool:
    """Tell whether so many images can't be read that the dataset must be looked at."""
    return unreadable > max(_FEW, MAX_UNREADABLE_SHARE * of)


class UnreadableDataError(InputError):
    """Say that too many images can't be read.

    A DataLoader raises a worker's error anew with the worker's traceback for a message; the line for the user
    is the last of it.
    """

    def __init__(self, message: str):
        super().__init__(message.rsplit(f"{type(self).__name__}: ", 1)[-1].strip())


class UnreadableRows:
    """Flag the rows of a dataset whose images can't be read, in memory that all processes share.

    Args:
        count (`int`): how many rows the dataset has.
        describe (`Callable`): from a row to what messages call it.
    """

    def __init__(self, count: int, describe: Callable[[int], str]):
        self.flags = torch.zeros(count, dtype=torch.bool).share_memory_()
        self._describe = describe

    def add(self, row: int, error: Exception) -> None:
        """Flag a row, and name it in a warning the first time.

        Raises:
            InputError: Once they are more than 1 % of all, and more than 5.
        """
        if self.flags[row]:
            return
        self.flags[row] = True
        logger.warning("Skipping an image that cannot be read: %s (%s)", self._describe(row), error)
        if too_many(int(self.flags.sum()), len(self.flags)):
            raise UnreadableDataError(f"{self.summary()}. At most {LIMIT} may be: repair or remove them.") from error

    def gather(self) -> None:
        """Add what other processes could not read; to be called in all of them."""
        rows = gather_object(self.flags.nonzero().flatten().tolist())
        self.flags[torch.tensor(rows, dtype=torch.long)] = True

    def replace(self, rows: Rows) -> Rows:
        """Give the rows, flagged ones replaced by the next that aren't.

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
        """Tell in one line which rows are flagged; `None` where none is."""
        rows = self.flags.nonzero().flatten().tolist()
        if not rows:
            return None
        names = [self._describe(row) for row in rows[:_NAMED]] + ["..."] * (len(rows) > _NAMED)
        return f"{len(rows):,} of {len(self.flags):,} images could not be read and were skipped: {', '.join(names)}"
