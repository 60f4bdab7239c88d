"""Choose the rows of an epoch that each process takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ..errors import InputError


class GlobalBatchSampler(BatchSampler):
    """Give one process its part of every global batch, the smaller last one of an epoch included.

    k processes of b examples see what one process of k·b sees. accelerate would fill the last batch up with examples
    of the first one, which would count twice in gradients and in the statistics of features. Where b is even, the rows
    2i and 2i + 1 of a global batch stay together, as long as each process gets two: they may be mixed with each other.
    `joins_last` lets a smaller last batch join the one before it.

    Raises:
        InputError: there are fewer rows than processes.
    """

    def __init__(
        self, sampler: Any, batch_size: int, num_processes: int, process_index: int, joins_last: bool = False
    ) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.num_processes, self.process_index, self.joins_last = num_processes, process_index, joins_last
        if len(sampler) < num_processes:
            raise InputError(
                f"{len(sampler)} examples are too few for {num_processes} processes: start at most {len(sampler)}."
            )

    def sizes(self) -> list[int]:
        """List how many rows each global batch has."""
        count, rest = divmod(len(self.sampler), self.batch_size * self.num_processes)  # type: ignore[arg-type]
        sizes = [self.batch_size * self.num_processes] * count
        if rest and count and self.joins_last:
            sizes[-1] += rest
        # Fewer rows than processes would leave one without a loss: they wait for another epoch's order.
        elif rest >= self.num_processes:
            sizes.append(rest)
        return sizes

    def part(self, size: int, process_index: int) -> slice:
        """Get the rows of a global batch that a process takes."""
        pairs = -(-size // 2)
        unit = 2 if self.batch_size % 2 == 0 and pairs >= self.num_processes else 1
        units = pairs if unit == 2 else size
        start, end = (unit * (units * (process_index + i) // self.num_processes) for i in (0, 1))
        return slice(start, min(end, size))

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        for size in self.sizes():
            yield list(islice(rows, size))[self.part(size, self.process_index)]

    def __len__(self) -> int:
        return len(self.sizes())


def share_order(loader: DataLoader, seed: int) -> None:
    """Let a training loader that accelerate has prepared draw the order of `seed` in all processes.

    accelerate takes torch's seed for it, and samplers that it does not know draw from what is everybody's. Streams and
    samplers with a generator of their own stay as they are.
    """
    shard = loader.batch_sampler
    sampler: Any = getattr(shard.batch_sampler, "sampler", None) if isinstance(shard, BatchSamplerShard) else None
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = seed
    elif getattr(sampler, "generator", "none") is None:
        sampler.generator = torch.Generator().manual_seed(seed)


def share_evenly(loader: DataLoader, avoids_single_rows: bool = False) -> bool:
    """Let each process take its part of an epoch's last global batch, and tell whether parts may differ in size now.

    Changed in place: a training loader that accelerate has prepared, unless it reads a stream or drops the last batch.
    With `avoids_single_rows`, the last batch joins the one before it if a process would get one row of it, of which
    BatchNorm has no variance.

    Raises:
        InputError: batches that are not full are dropped, and none is full.
    """
    # A stream's sampler has no length, and each process reads a stream of its own.
    if isinstance(loader.dataset, IterableDataset):
        return False
    shard: Any = loader.batch_sampler
    processes, index, batches = 1, 0, shard
    if isinstance(shard, BatchSamplerShard) and not shard.split_batches:
        processes, index, batches = shard.num_processes, shard.process_index, shard.batch_sampler
    if isinstance(batches, BatchSampler) and batches.drop_last and not len(shard):
        raise InputError(
            f"{len(loader.dataset)} examples fill no batch of {batches.batch_size * processes}, and "  # type: ignore
            "`dataloader_drop_last=True` drops them all. Set a smaller `per_device_train_batch_size`, or "
            "`dataloader_drop_last=False`."
        )
    if type(batches) is not BatchSampler or batches.drop_last:
        return False
    rest = len(batches.sampler) % (batches.batch_size * processes)  # type: ignore[arg-type]
    if rest == 0:
        return False
    ours = GlobalBatchSampler(batches.sampler, batches.batch_size, processes, index)
    parts = [ours.part(rest, process) for process in range(processes)]
    ours.joins_last = avoids_single_rows and min(part.stop - part.start for part in parts) < 2
    if batches is not shard:
        # What it wraps knows its process: Trainer does the same to its own batch samplers.
        shard.batch_sampler, shard.num_processes, shard.process_index, shard.even_batches = ours, 1, 0, False
    elif ours.joins_last:
        # A loader refuses to set it as an attribute.
        base: Any = loader.base_dataloader  # type: ignore[attr-defined]
        vars(base)["batch_sampler"] = ours
    return processes > 1


def count_stream(loader: DataLoader) -> DataLoader:
    """Let accelerate know how many rows of a stream's last batch do not fill it up, as it knows of tables.

    An evaluation's loader that does not read all of a stream in every process stays as it is.
    """
    shard = loader.dataset
    if isinstance(shard, IterableDatasetShard) and loader.num_workers == 0:
        whole = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        shard.dataset = _CountedStream(shard.dataset, loader, whole)
    return loader


class _CountedStream:
    """Stand for a stream that tells its loader the remainder once it was read."""

    def __init__(self, stream: Any, loader: Any, whole: int) -> None:
        self.stream, self.loader, self.whole = stream, loader, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for row in self.stream:
            count += 1
            yield row
        self.loader.remainder = count % self.whole
