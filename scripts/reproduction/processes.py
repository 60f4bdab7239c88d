"""Runs side by side: each process trains alone, on its share of the cells and on one GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch.distributed import rendezvous

# By these, accelerate and transformers would make one training of all processes. LOCAL_WORLD_SIZE stays: it says how
# many share the cores.
_JOINING = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
_FOREVER = timedelta(days=365)


@dataclass
class Place:
    """Say which of several processes this is.

    Args:
        rank, world (`int`): its number, and how many there are.
        store (`torch.distributed.Store`, *optional*): what all of them can read and write.
    """

    rank: int = 0
    world: int = 1
    store: Any = None

    def share(self, cells: list[Any], kind: Callable[[Any], Any]) -> Iterator[Any]:
        """Iterate over this process's part of a list that is the same in every process, then help where most is left.

        Runs of one kind stay together: what is done once for all of them is done by few processes.

        Args:
            cells (`list`): the runs.
            kind (`Callable`): from a run to what it has in common with others; can be sorted.
        """
        cells = sorted(cells, key=kind)
        if self.store is None:
            yield from cells
            return
        bounds = [len(cells) * rank // self.world for rank in range(self.world + 1)]
        parts = [cells[start:end] for start, end in pairwise(bounds)]
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
        """Give the first process's list in all of them: what each finds changes while the others work."""
        if self.store is None:
            return found
        if self.rank == 0:
            self.store.set("found", json.dumps(found))
        return list(json.loads(self.store.get("found")))

    def total(self, **counts: int) -> dict[str, int]:
        """Wait for all processes, and add up what each counted.

        A launcher ends all processes when one ends with an error, so each must wait for the others before it does.
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
    """Read from the environment what a launcher says of this process, then forget it, and choose a GPU.

    To be called before anything asks CUDA for its devices or accelerate for its state: both look once.

    Returns:
        [`Place`]: of this process alone where nothing was launched.
    """
    world, local_rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    place = Place()
    if world > 1:
        store, rank, world = next(rendezvous("env://"))
        place = Place(rank, world, store)
        # Idle threads that spin would slow down the other processes.
        torch.set_num_threads(1)
    elif "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        print("accelerate has started one process: for several on one GPU, or on none, give it --multi_gpu.")
    for name in _JOINING:
        os.environ.pop(name, None)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank % len(gpus)]
    return place
