"""Make batches ahead of a training, on its device."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler


class BatchDataset(Dataset):
    """Give batches in two steps, so that they can be made ahead on a training's device.

    Attributes:
        epoch (`int`): The epoch whose batches come next.
    """

    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.epoch = epoch

    def start_reading(self, indices: list[int], epoch: int, device: torch.device) -> Callable[[], Any] | None:
        """Begin to read rows that take next to no work, and return what waits for them; `None` for all others."""
        return None

    def read(self, indices: list[int], epoch: int, device: torch.device) -> Any:
        """Read what a batch is made of, on its way to a device."""
        raise NotImplementedError

    def start_workers(self, count: int) -> None:
        """Start processes that help to read; none by default."""

    def finish(self, batch: Any, device: torch.device) -> dict[str, Tensor]:
        """Make a batch of what was read, on a device."""
        raise NotImplementedError


class PendingBatch:
    """Stand for a batch that is made when it is needed, or before.

    accelerate asks for a batch ahead of the one that it moves to its device, which is when this one is needed.

    Args:
        make (`Callable`): makes the batch on its device, and tells after which event of its stream it is there.
    """

    def __init__(self, make: Callable[[], tuple[dict[str, Tensor], Any]]):
        self._make = make
        self._made: tuple[dict[str, Tensor], Any] | None = None

    def prepare(self) -> None:
        """Make the batch, if it isn't made yet."""
        if self._made is None:
            self._made = self._make()

    def to(self, device: Any, non_blocking: bool = False) -> dict[str, Tensor]:
        """Give the batch: `pixel_values` and `labels` on a device."""
        self.prepare()
        batch, ready = self._made  # type: ignore[misc]
        if ready is not None:
            current = torch.cuda.current_stream()
            current.wait_event(ready)
            for values in batch.values():
                # Their memory belongs to the stream that made them.
                values.record_stream(current)
        return {name: values.to(device, non_blocking=non_blocking) for name, values in batch.items()}


class BatchMaker:
    """Collate rows into a [`PendingBatch`]: decoded in a thread, made on a CUDA stream beside the training's.

    What needs no decoding has no thread of its own, which would wait for the training's Python, and the training for
    its: it is begun as soon as a batch is asked for, and waited for when the batch is made.

    Args:
        dataset ([`BatchDataset`]): where rows are read.
        device (`torch.device`): where batches go.
    """

    def __init__(self, dataset: BatchDataset, device: torch.device):
        self.dataset, self.device = dataset, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._latest: PendingBatch | None = None
        self._skipped = 0

    def skip(self, count: int) -> None:
        """Make nothing of the next batches, which are asked for and thrown away: a stream that is gone on with."""
        self._skipped = count

    def __call__(self, indices: list[int]) -> PendingBatch:
        if self._skipped:
            self._skipped -= 1
            return PendingBatch(lambda: ({}, None))
        epoch = self.dataset.epoch
        read = self.dataset.start_reading(indices, epoch, self.device)
        if read is None:
            read = _reader(os.getpid()).submit(self._read, indices, epoch).result
        self._latest = PendingBatch(lambda: self._finish(read()))
        return self._latest

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch its batches belong to; streams count their own."""
        if not isinstance(self.dataset, IterableDataset):
            self.dataset.set_epoch(epoch)

    def prepare(self) -> None:
        """Make the batch that comes next, if one was asked for: best while the device has other work."""
        if self._latest is not None:
            self._latest.prepare()
            self._latest = None

    def _read(self, indices: list[int], epoch: int) -> Any:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return self.dataset.read(indices, epoch, self.device)

    def _finish(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext(), torch.no_grad():
            return self.dataset.finish(batch, self.device), self._stream.record_event() if self._stream else None


class _Rows(torch.utils.data.Dataset):
    """Give row numbers: images are read where a batch is made of them."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return index

    # All of a batch at once, which a DataLoader asks for where it can.
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def batch_loader(
    dataset: BatchDataset,
    batch_size: int,
    device: torch.device,
    sampler: Sampler | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    shuffle: bool = False,
) -> DataLoader:
    """Build a loader whose batches are made ahead, for `accelerator.prepare`.

    Args:
        dataset ([`BatchDataset`]): the images.
        batch_size (`int`): images a batch.
        device (`torch.device`): where batches go.
        sampler (`torch.utils.data.Sampler`, *optional*): the order; by default the dataset's,
            and always for streams.
        drop_last (`bool`, *optional*, defaults to `False`): whether a smaller last batch is left out.
        num_workers (`int`, *optional*, defaults to 0): processes that decode; 0 leaves it to threads of this one.
        shuffle (`bool`, *optional*, defaults to `False`): a random order, in the place of a sampler.

    Returns:
        `torch.utils.data.DataLoader`: gives a [`PendingBatch`] each time; call its `to(device)`.
    """
    dataset.start_workers(num_workers)
    rows: Any = dataset
    if isinstance(dataset, IterableDataset):
        sampler, shuffle = None, False
    else:
        rows = _Rows(dataset)
    collate = BatchMaker(dataset, device)
    return DataLoader(rows, batch_size, shuffle, sampler, drop_last=drop_last, collate_fn=collate)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host's to a device; from pinned memory, or the host would wait for what CUDA has to do."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def thread_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Build a pool of threads in which torch's operations start no threads of their own."""
    # Looked up here, once: a lookup holds the loader's lock, which a process forked meanwhile would wait for.
    openmp = ThreadpoolController()

    def begin() -> None:
        # Asked for once, so that torch doesn't set it anew.
        torch.get_num_threads()
        openmp.limit(limits=1, user_api="openmp")

    return ThreadPoolExecutor(count, name, initializer=begin)


# One thread, and none of a parent's in a process that was forked.
@cache
def _reader(process: int) -> ThreadPoolExecutor:
    return thread_pool(1, "read")
