"""Make batches ahead of a training, on its device."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


class BatchDataset(Dataset):
    """Give batches in two steps, so that they can be made ahead on a training's device.

    Attributes:
        epoch (`int`): The epoch whose batches come next.
    """

    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.epoch = epoch

    def read(self, indices: list[int], epoch: int, device: torch.device) -> Any:
        """Read what a batch is made of, on its way to a device."""
        raise NotImplementedError

    def start_workers(self, count: int) -> None:
        """Start processes that help to read; none by default."""

    def finish(self, batch: Any, device: torch.device) -> dict[str, Tensor]:
        """Make a batch of what was read, on a device."""
        raise NotImplementedError


class PendingBatch:
    """Stand for a batch that is being made: `to` waits for it.

    accelerate moves a batch to its device when the training is about to need it, and asks for the one after it
    first: so that one is made while the training works.
    """

    def __init__(self, batch: Future[tuple[dict[str, Tensor], Any]]):
        self._batch = batch

    def to(self, device: Any, non_blocking: bool = False) -> dict[str, Tensor]:
        """Wait for the batch: `pixel_values` and `labels` on the device."""
        batch, made = self._batch.result()
        if made is not None:
            current = torch.cuda.current_stream()
            current.wait_event(made)
            for values in batch.values():
                # Their memory belongs to the stream that made them.
                values.record_stream(current)
        return {name: values.to(device, non_blocking=non_blocking) for name, values in batch.items()}


class BatchMaker:
    """Collate rows into a [`PendingBatch`], made in a thread and, on CUDA, on a stream beside the training's.

    Args:
        dataset ([`BatchDataset`]): where rows are read.
        device (`torch.device`): where batches go.
    """

    def __init__(self, dataset: BatchDataset, device: torch.device):
        self.dataset, self.device = dataset, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, indices: list[int]) -> PendingBatch:
        return PendingBatch(_maker(os.getpid()).submit(self._make, indices, self.dataset.epoch))

    def _make(self, indices: list[int], epoch: int) -> tuple[dict[str, Tensor], Any]:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext(), torch.no_grad():
            raw = self.dataset.read(indices, epoch, self.device)
            batch = self.dataset.finish(raw, self.device)
            return batch, self._stream.record_event() if self._stream else None


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

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)


def batch_loader(
    dataset: BatchDataset,
    batch_size: int,
    device: torch.device,
    sampler: Sampler | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
) -> DataLoader:
    """Build a loader whose batches are made ahead, for `accelerator.prepare`.

    Args:
        dataset ([`BatchDataset`]): the images.
        batch_size (`int`): images a batch.
        device (`torch.device`): where batches go.
        sampler (`torch.utils.data.Sampler`, *optional*): the order; by default the dataset's.
        drop_last (`bool`, *optional*, defaults to `False`): whether a smaller last batch is left out.
        num_workers (`int`, *optional*, defaults to 0): processes that decode; 0 leaves it to threads of this one.

    Returns:
        `torch.utils.data.DataLoader`: gives a [`PendingBatch`] each time; call its `to(device)`.
    """
    dataset.start_workers(num_workers)
    return DataLoader(
        _Rows(dataset),
        batch_size,
        sampler=sampler,
        drop_last=drop_last,
        collate_fn=BatchMaker(dataset, device),
    )


def single_threaded() -> None:
    """Keep torch's operations in this thread; by default each thread that calls them starts a team of its own."""
    # Asked for once, so that torch doesn't set it anew.
    torch.get_num_threads()
    threadpool_limits(1, user_api="openmp")


# One thread, and none of a parent's in a process that was forked.
@cache
def _maker(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "batch", initializer=single_threaded)
