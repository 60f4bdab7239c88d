"""Read the rows of a stream in a process of their own."""

from __future__ import annotations

import mmap
import multiprocessing
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

# Rows that the process sends at a time.
_ROWS = 64
# Memory in which it sends their files: some slots, and the bytes of one.
_SLOTS, _SLOT_BYTES = 24, 2**23


class StreamRows(IterableDataset):
    """Read the rows of a stream in a process: each takes a while in which Python's lock is held.

    Encoded images come as views of memory that both processes share.

    Args:
        dataset ([`StreamingDataset`]): Its rows are dictionaries, of which `image_column` holds an image as
            `datasets.Image(decode=False)` gives it.
    """

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        column, slots = self.dataset.image_column, _Slots()
        how: Any = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": partial(_pack, column, slots)}
        for rows, sent in DataLoader(_WithError(self.dataset), _ROWS, **how):
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


class _Slots:
    """Share memory with a process that is forked later. torch's own needs /dev/shm, which containers keep small."""

    def __init__(self) -> None:
        self._memory = np.frombuffer(mmap.mmap(-1, _SLOTS * _SLOT_BYTES), np.uint8).reshape(_SLOTS, _SLOT_BYTES)
        self._free = multiprocessing.get_context("fork").SimpleQueue()
        for slot in range(_SLOTS):
            self._free.put(slot)

    def write(self, files: list[bytes]) -> int | bytes:
        """Put files into a free slot and return its number; if there is none, or they are too large, themselves."""
        length = sum(map(len, files))
        if not 0 < length <= _SLOT_BYTES or self._free.empty():
            return b"".join(files)
        slot: int = self._free.get()
        np.concatenate([np.frombuffer(file, np.uint8) for file in files], out=self._memory[slot, :length])
        return slot

    def read(self, sent: int | bytes) -> memoryview:
        """Show what was written. A slot is free again once nobody refers to any part of it."""
        if isinstance(sent, bytes):
            return memoryview(sent)
        shown = self._memory[sent]
        weakref.finalize(shown, self._free.put, sent).atexit = False
        return memoryview(shown)


def _pack(column: str, slots: _Slots, rows: list[Any]) -> tuple[list[Any], int | bytes]:
    """Take the encoded images out of rows, and leave their lengths."""
    files = []
    for row in rows:
        image = None if isinstance(row, Exception) else row[column]
        if image and image.get("bytes") is not None:
            files.append(image["bytes"])
            row[column] = {**image, "bytes": len(image["bytes"])}
    return rows, slots.write(files)
