"""Read the rows of a stream in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

# Rows that the process sends at a time.
_ROWS = 64


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
        column = self.dataset.image_column
        how: Any = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": partial(_pack, column)}
        for rows, files in DataLoader(_WithError(self.dataset), _ROWS, **how):
            shared, start = memoryview(files.numpy()), 0
            for row in rows:
                if isinstance(row, Exception):
                    raise row
                image = row[column]
                if image and image["bytes"] is not None:
                    end = start + image["bytes"]
                    image["bytes"], start = shared[start:end], end
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


def _pack(column: str, rows: list[Any]) -> tuple[list[Any], Tensor]:
    """Take the encoded images out of rows, and leave their lengths: processes share tensors without copying them."""
    files = []
    for row in rows:
        image = None if isinstance(row, Exception) else row[column]
        if image and image.get("bytes") is not None:
            files.append(np.frombuffer(image["bytes"], np.uint8))
            row[column] = {**image, "bytes": len(image["bytes"])}
    packed = torch.empty(sum(map(len, files)), dtype=torch.uint8)
    if files:
        np.concatenate(files, out=packed.numpy())
    return rows, packed
