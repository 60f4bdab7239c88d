"""Run experiments side by side: each process trains alone, on its part of them and on one GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any

import accelerate.state
import torch
from torch.distributed import PrefixStore, rendezvous

# With these, accelerate and transformers would join the processes to one training. LOCAL_WORLD_SIZE stays, as it says
# how many processes share the cores.
_JOINING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
_FOREVER = timedelta(days=365)


@dataclass
class Place:
    """Say which of several launched processes this is.

    Args:
        rank, world (`int`): Its number, and the number of processes.
        store (`torch.distributed.Store`, *optional*): A store that all processes can read and write.
    """

    rank: int = 0
    world: int = 1
    store: Any = None

    def of(self, name: str) -> Place:
        """Return the same place with a store of its own, for one of several suites."""
        return self if self.store is None else replace(self, store=PrefixStore(name, self.store))

    def share(self, items: list[Any], kind: Callable[[Any], Any]) -> Iterator[Any]:
        """Iterate over this process's part of a list, then over what is left of the longest other part.

        Items of one kind stay together, so that few processes load what they have in common.

        Args:
            items (`list`): The same list in every process.
            kind (`Callable`): Maps an item to a sortable key of what it has in common with others.
        """
        items = sorted(items, key=kind)
        if self.store is None:
            yield from items
            return
        bounds = [len(items) * rank // self.world for rank in range(self.world + 1)]
        parts = [items[start:end] for start, end in pairwise(bounds)]
        part = self.rank
        while True:
            taken = self.store.add(f"taken/{part}", 1)
            if taken <= len(parts[part]):
                yield parts[part][taken - 1]
                continue
            left = [len(others) - self.store.add(f"taken/{rank}", 0) for rank, others in enumerate(parts)]
            if max(left) <= 0:
                return
            part = left.index(max(left))

    def agree(self, found: list[str]) -> list[str]:
        """Return the first process's list in all processes, as files change while others already run."""
        if self.store is None:
            return found
        if self.rank == 0:
            self.store.set("found", json.dumps(found))
        return list(json.loads(self.store.get("found")))

    def total(self, **counts: int) -> dict[str, int]:
        """Wait for all processes, and add up their counts.

        A launcher ends all processes when one exits with an error, so each waits for the others first.
        """
        if self.store is None:
            return counts
        for name, count in counts.items():
            self.store.add(name, count)
        if self.store.add("done", 1) == self.world:
            self.store.set("all", "done")
        self.store.wait(["all"], _FOREVER)
        return {name: self.store.add(name, 0) for name in counts}


def take_place() -> Place:
    """Read this process's place from the launcher's environment, remove it there, and choose a GPU.

    Call it before anything asks CUDA for devices or accelerate for its state, as both look only once.
    """
    world, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    place = Place()
    if world > 1:
        store, rank, world = next(rendezvous("env://"))
        place = Place(rank, world, store)
        # Idle threads that spin slow down the other processes.
        torch.set_num_threads(1)
    elif "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        print("accelerate started one process. For several on one GPU, or without a GPU, type: --multi_gpu")
    for name in _JOINING:
        os.environ.pop(name, None)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank % len(gpus)]
    # Each set of training arguments asks nvidia-smi for the GPUs' names: a second a time where many processes ask.
    accelerate.state.check_cuda_p2p_ib_support = cache(accelerate.state.check_cuda_p2p_ib_support)
    return place
