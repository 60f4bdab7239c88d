"""Read the rows of a stream in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .board import Slots

# Rows that the process sends at a time, and how often before they are asked for.
_ROWS, _AHEAD = 64, 12


class StreamRows(IterableDataset):
    """Read the rows of a stream in a process: each takes a while in which Python's lock is held.

    Encoded images come as views of memory that both processes share.

    Args:
        dataset ([`StreamingDataset`]): Its rows are dictionaries, of which `image_column` holds an image as
            `datasets.Image(decode=False)` gives it; `files` lend the memory.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        column = self.dataset.image_column
        how: Any = {"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": _AHEAD}
        with self.dataset.files.lend() as slots:
            for rows, sent in DataLoader(
                _WithError(self.dataset), _ROWS, collate_fn=partial(_pack, column, slots), **how
            ):
                files, start = slots.read(sent), 0
                for row in rows:
                    if isinstance(row, Exception):
                        raise row
                    image = row[column]
                    if image and image["bytes"] is not None:
                        end = start + image["bytes"]
                        image["bytes"], start = files[start:end], end
                    yield row


class _WithError(IterableDataset):
    """End with the error that ends a dataset, which a process would wrap in a text of its own."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.dataset
        except Exception as error:
            yield error


def _pack(column: str, slots: Slots, rows: list[Any]) -> tuple[list[Any], int | bytes]:
    """Take the encoded images out of rows, and leave their lengths."""
    files = []
    for row in rows:
        image = None if isinstance(row, Exception) else row[column]
        if image and image.get("bytes") is not None:
            files.append(image["bytes"])
            row[column] = {**image, "bytes": len(image["bytes"])}
    return rows, slots.write(files)
