"""Read the rows of a stream in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .board import Slots

# Rows that the process sends at a time, and how often before they are asked for.
_ROWS, _AHEAD = 64, 12


class StreamRows(IterableDataset):
    """Read the rows of a stream in a process: each takes a while in which Python's lock is held.

    Encoded images come as views of memory that both processes share. In training, the process goes on with the next
    pass while the last batches of this one are used.

    Args:
        dataset ([`StreamingDataset`]): Its rows are dictionaries, of which `image_column` holds an image as
            `datasets.Image(decode=False)` gives it; `files` lend the memory.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset
        # What is read of the next pass, and its epoch.
        self._next: tuple[Iterator[Any], int] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        begun, self._next = self._next, None
        epoch = self.dataset.epoch
        rows = begun[0] if begun and begun[1] == epoch else _read(self.dataset, epoch)
        del begun
        for row in rows:
            if row is None:
                if not self.dataset.evaluation:
                    self._next = rows, epoch + 1
                return
            yield row


# No method: what it gives would keep its object, and the process, alive.
def _read(dataset: Any, epoch: int) -> Iterator[Any]:
    """Iterate over the rows of this pass and the next ones, with `None` after each pass."""
    how: Any = {"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": _AHEAD}
    with dataset.files.lend() as slots:
        how["collate_fn"] = partial(_pack, dataset.image_column, slots)
        for rows, sent in DataLoader(_Passes(dataset, epoch), None, **how):
            files, start = slots.read(sent), 0
            for row in rows:
                if isinstance(row, Exception):
                    raise row
                image = row and row[dataset.image_column]
                if image and image["bytes"] is not None:
                    end = start + image["bytes"]
                    image["bytes"], start = files[start:end], end
                yield row


class _Passes(IterableDataset):
    """Give rows in lists, pass after pass, and `None` after the last row of each; evaluation has one pass.

    The error that ends a dataset is given too: a process would wrap it in a text of its own.
    """

    def __init__(self, dataset: Any, epoch: int):
        self.dataset, self.epoch = dataset, epoch

    def __iter__(self) -> Iterator[list[Any]]:
        rows: list[Any] = []
        for row in self._rows():
            rows.append(row)
            if len(rows) == _ROWS or row is None or isinstance(row, Exception):
                yield rows
                rows = []

    def _rows(self) -> Iterator[Any]:
        for epoch in [self.epoch] if self.dataset.evaluation else count(self.epoch):
            self.dataset.set_epoch(epoch)
            try:
                yield from self.dataset
            except Exception as error:
                yield error
                return
            yield None


def _pack(column: str, slots: Slots, rows: list[Any]) -> tuple[list[Any], int | bytes]:
    """Take the encoded images out of rows, and leave their lengths."""
    files = []
    for row in rows:
        image = None if row is None or isinstance(row, Exception) else row[column]
        if image and image.get("bytes") is not None:
            files.append(image["bytes"])
            row[column] = {**image, "bytes": len(image["bytes"])}
    return rows, slots.write(files)
