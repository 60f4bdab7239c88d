"""Which rows of an epoch each process takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader

from ..errors import InputError


class GlobalBatchSampler(BatchSampler):
    """Give one process its part of every global batch, the last and smaller one of an epoch included.

    k processes of b examples see what one process of k·b sees. accelerate would fill the last batch up with examples
    of the first one, which would count twice in gradients and in the statistics of features. Where b is even, the rows
    2i and 2i + 1 of a global batch stay together, as long as each process gets two: they may be mixed with each other.

    Args:
        sampler (`torch.utils.data.Sampler`): the order of all rows, the same in every process.
        batch_size (`int`): b, rows of a process.
        num_processes (`int`): k.
        process_index (`int`): which of them this is.

    Raises:
        InputError: there are fewer rows than processes.

    Example:

    ```python
    >>> from entame_hf.sharding import GlobalBatchSampler

    >>> [list(GlobalBatchSampler(range(10), 2, num_processes=3, process_index=rank)) for rank in range(3)]
    [[[0, 1], [6]], [[2, 3], [7]], [[4, 5], [8, 9]]]
    ```
    """

    def __init__(self, sampler: Any, batch_size: int, num_processes: int, process_index: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self.num_processes, self.process_index = num_processes, process_index
        if len(sampler) < num_processes:
            raise InputError(
                f"{len(sampler)} examples are too few for {num_processes} processes: start at most {len(sampler)}."
            )

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        while batch := list(islice(rows, self.batch_size * self.num_processes)):
            pairs = -(-len(batch) // 2)
            unit = 2 if self.batch_size % 2 == 0 and pairs >= self.num_processes else 1
            units = pairs if unit == 2 else len(batch)
            start, end = (unit * (units * (self.process_index + i) // self.num_processes) for i in (0, 1))
            # Fewer rows than processes would leave one without a loss: they wait for another epoch's order.
            if len(batch) >= self.num_processes:
                yield batch[start:end]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size * self.num_processes)  # type: ignore[arg-type]
        return whole + (rest >= self.num_processes)


def share_order(loader: DataLoader, seed: int) -> None:
    """Let a sampler draw the same order in all processes, whatever random numbers each of them has.

    accelerate takes torch's seed for it, and samplers that it does not know draw from what is everybody's.

    Args:
        loader (`torch.utils.data.DataLoader`): of a training, prepared by accelerate; those of streams stay as they
            are, and so do samplers with a generator of their own.
        seed (`int`): the same in every process.
    """
    shard = loader.batch_sampler
    sampler: Any = getattr(shard.batch_sampler, "sampler", None) if isinstance(shard, BatchSamplerShard) else None
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = seed
    elif getattr(sampler, "generator", "none") is None:
        sampler.generator = torch.Generator().manual_seed(seed)


def share_evenly(loader: DataLoader) -> bool:
    """Let each process take its part of an epoch's last global batch, in a loader that accelerate has prepared.

    Args:
        loader (`torch.utils.data.DataLoader`): of a training; one that does not take whole batches of row numbers by
            turns, as streams don't, and one that drops the last batch, stay as they are.

    Returns:
        `bool`: whether processes may now have parts of different sizes.
    """
    shard = loader.batch_sampler
    if not isinstance(shard, BatchSamplerShard) or shard.split_batches or shard.drop_last:
        return False
    batches = shard.batch_sampler
    if type(batches) is not BatchSampler:
        return False
    whole = batches.batch_size * shard.num_processes
    if len(batches.sampler) % whole == 0:  # type: ignore[arg-type]
        return False
    shard.batch_sampler = GlobalBatchSampler(
        batches.sampler, batches.batch_size, shard.num_processes, shard.process_index
    )
    # What it wraps knows its process: Trainer does the same to its own batch samplers.
    shard.num_processes, shard.process_index, shard.even_batches = 1, 0, False
    return True


def count_stream(loader: DataLoader) -> None:
    """Let accelerate know how many rows of a stream's last batch do not fill it up, as it knows of tables.

    Args:
        loader (`torch.utils.data.DataLoader`): of an evaluation, prepared by accelerate; one that does not read all of
            a stream in every process stays as it is.
    """
    shard = loader.dataset
    if isinstance(shard, IterableDatasetShard) and loader.num_workers == 0:
        whole = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        shard.dataset = _CountedStream(shard.dataset, loader, whole)


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
