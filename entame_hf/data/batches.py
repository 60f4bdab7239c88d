"""Load batches ahead of the training, on its device."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from .stream_rows import StreamRows

# Batches that are requested before the one that is used; accelerate asks for one more.
_AHEAD = 2
# Processes that start otherwise get their data pickled, which not every dataset can be.
CAN_FORK = "fork" in multiprocessing.get_all_start_methods()


class BatchDataset(Dataset):
    """Give batches in two steps, reading on the host and finishing on the training device; `epoch` comes next."""

    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next."""
        self.epoch = epoch

    def start_copying(self, indices: list[int], epoch: int, device: torch.device) -> Callable[[], Any] | None:
        """Start to read a batch that takes hardly any work, and return what waits for it; `None` for other batches."""
        return None

    def start_reading(self, indices: list[int], epoch: int, device: torch.device) -> Callable[[], Any]:
        """Start to read a batch, and return what waits for it. Batches are started and waited for in order."""
        return partial(self.read, indices, epoch, device)

    def read(self, indices: list[int], epoch: int, device: torch.device) -> Any:
        """Read a batch on the host; `device` is where it goes next."""
        raise NotImplementedError

    def start_workers(self, count: int) -> None:
        """Start processes that decode; none by default."""

    def gather_unreadable(self) -> None:
        """Count the images that no rank could read, for the whole job. To be called in all ranks."""

    def for_evaluation(self) -> BatchDataset:
        """Give the same images as evaluation sees them; by default there is no difference."""
        return self

    @contextmanager
    def evaluation_view(self) -> Iterator[BatchDataset]:
        """Show the same images as evaluation sees them, for as long as this context lasts."""
        yield self.for_evaluation()

    def finish(self, batch: Any, device: torch.device) -> dict[str, Tensor]:
        """Turn what was read into a model's input on a device."""
        raise NotImplementedError


def for_evaluation(dataset: Any) -> Any:
    """Give a dataset, or a subset of one, as evaluation sees its images; another's dataset as it is."""
    if isinstance(dataset, Subset):
        return Subset(for_evaluation(dataset.dataset), dataset.indices)
    return dataset.for_evaluation() if isinstance(dataset, BatchDataset) else dataset


def holds_batches(dataset: Any) -> bool:
    """Tell whether a dataset is a [`BatchDataset`], or a subset of one."""
    return holds_batches(dataset.dataset) if isinstance(dataset, Subset) else isinstance(dataset, BatchDataset)


class PendingBatch:
    """Stand for a batch that is made when it is needed, or before, and the CUDA event after which it is complete.

    accelerate fetches a batch ahead, and needs it when it moves it to the device.
    """

    def __init__(self, make: Callable[[], tuple[dict[str, Tensor], Any]]):
        self._make = make
        self._made: tuple[dict[str, Tensor], Any] | None = None

    @property
    def is_made(self) -> bool:
        """Whether the batch is made."""
        return self._made is not None

    def prepare(self) -> None:
        """Make the batch, unless it is made."""
        if self._made is None:
            self._made = self._make()

    def to(self, device: Any, non_blocking: bool = False) -> dict[str, Tensor]:
        """Return the batch on a device: `pixel_values` and `labels`."""
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
    """Collate rows into a [`PendingBatch`]: read in threads, finished on a CUDA stream beside the training's.

    One thread starts to read batches and another one waits for them, so that workers decode the next batch meanwhile.
    Cached batches skip these threads to avoid contention for the GIL: copying starts when a batch is requested.
    """

    def __init__(self, dataset: BatchDataset, device: torch.device):
        self.dataset, self.device = dataset, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Requested and not made yet, oldest first; those of an epoch that was left drop out.
        self._pending: deque[PendingBatch] = deque(maxlen=_AHEAD + 2)
        self._skipped = self._epoch = 0

    def skip(self, count: int) -> None:
        """Leave the next batches empty: a resumed stream requests and drops them."""
        self._skipped = count

    def __call__(self, indices: list[int]) -> PendingBatch:
        if self._skipped:
            self._skipped -= 1
            return PendingBatch(lambda: ({}, None))
        epoch = self.dataset.epoch
        read = self.dataset.start_copying(indices, epoch, self.device)
        if read is None:
            start = self.dataset.start_reading
            started = _thread(os.getpid(), "start").submit(self._call, start, indices, epoch, self.device)
            read = _thread(os.getpid(), "wait").submit(lambda: self._call(started.result())).result
        batch = PendingBatch(lambda: self._finish(read()))
        self._forget_made()
        self._pending.append(batch)
        return batch

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset the epoch of the next batches; streams count their own. To be called in all ranks."""
        if epoch != self._epoch:
            self._epoch = epoch
            self.dataset.gather_unreadable()
        if not isinstance(self.dataset, IterableDataset):
            self.dataset.set_epoch(epoch)

    def prepare(self) -> None:
        """Make the next batch, if one was requested: best while the device is busy."""
        self._forget_made()
        if self._pending:
            self._pending.popleft().prepare()

    def _forget_made(self) -> None:
        while self._pending and self._pending[0].is_made:
            self._pending.popleft()

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return function(*args)

    def _finish(self, batch: Any) -> tuple[dict[str, Tensor], Any]:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext(), torch.no_grad():
            return self.dataset.finish(batch, self.device), self._stream.record_event() if self._stream else None


class _Rows(torch.utils.data.Dataset):
    """Give row numbers: the collator reads the images."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> int:
        return index

    # DataLoader calls this for a whole batch.
    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class BatchLoader(DataLoader):
    """Request batches ahead of their use, so that several are read at the same time."""

    def __iter__(self) -> Any:
        ahead: deque[Any] = deque()
        for batch in super().__iter__():
            ahead.append(batch)
            if len(ahead) > _AHEAD:
                yield ahead.popleft()
        yield from ahead


def batch_loader(
    dataset: BatchDataset,
    batch_size: int,
    device: torch.device,
    sampler: Sampler | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    shuffle: bool = False,
) -> DataLoader:
    """Build a loader of [`PendingBatch`]es, which are made ahead on a device; call their `to(device)`.

    `num_workers` processes decode; 0 decodes in threads. Streams have no sampler and are not shuffled here.
    """
    dataset.start_workers(num_workers)
    rows: Any = _Rows(dataset)
    if isinstance(dataset, IterableDataset):
        sampler, shuffle, rows = None, False, StreamRows(dataset) if num_workers and CAN_FORK else dataset
    collate = BatchMaker(dataset, device)
    return BatchLoader(rows, batch_size, shuffle, sampler, drop_last=drop_last, collate_fn=collate)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device; without pinned memory, the host would wait for CUDA's queue."""
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


def thread_pool(count: int, name: str) -> ThreadPoolExecutor:
    """Build a pool of threads in which torch's operations start no further threads."""
    # Here and once: the lookup holds the dynamic loader's lock, which a process forked meanwhile would wait for.
    openmp = ThreadpoolController()

    def begin() -> None:
        # After this call, torch does not set the number again.
        torch.get_num_threads()
        openmp.limit(limits=1, user_api="openmp")

    return ThreadPoolExecutor(count, name, initializer=begin)


# A forked process has none of its parent's threads.
@cache
def _thread(process: int, name: str) -> ThreadPoolExecutor:
    return thread_pool(1, name)
