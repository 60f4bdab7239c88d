"""Clocks that watch a training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import TrainerCallback


class StepClock(TrainerCallback):
    """Note when each step ended, with the device's queue empty at the ends that are read."""

    def __init__(self, *read: int) -> None:
        self.read = read
        self.ends: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.read:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends[state.global_step] = time.perf_counter()

    def rate(self, batch: int, first: int, last: int) -> float:
        return batch * (last - first) / (self.ends[last] - self.ends[first])


class Marks:
    """Points in the time of a device, which is not waited for."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def add(self) -> None:
        if torch.cuda.is_available():
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Between each point and the next."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairwise(self.marks)]
        return [1e3 * (end - start) for start, end in pairwise(self.marks)]


class EpochTimer(TrainerCallback):
    """Mark the ends of epochs. What is waited for between two of them belongs to the later one."""

    def __init__(self) -> None:
        self.ends = Marks()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.add()


class EpochTurns(TrainerCallback):
    """Let trainings that are there at the same time train for an epoch each, in turn, and time these epochs.

    Args:
        file (`Path`): grows by a byte when a training is ready, and by one at the end of each turn.
        place (`int`): of this training among them.
        count (`int`): how many trainings there are.
        warm_up (`int`): how many epochs come first, at whatever time.
    """

    def __init__(self, file: Path, place: int, count: int, warm_up: int) -> None:
        self.file, self.place, self.count, self.warm_up = file, place, count, warm_up
        self.seconds: list[float] = []
        self._begun = 0

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        turn = self._begun - self.warm_up
        self._begun += 1
        if turn < 0:
            return
        self._synchronise()
        if turn == 0:
            self._write(state)
        while not self.file.exists() or self.file.stat().st_size < self.count * (turn + 1) + self.place:
            time.sleep(0.001)
        self._start = time.perf_counter()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._begun > self.warm_up:
            self._synchronise()
            self.seconds.append(time.perf_counter() - self._start)
            self._write(state)

    def _write(self, state: Any) -> None:
        if state.is_world_process_zero:
            with self.file.open("ab") as file:
                file.write(b".")

    def _synchronise(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class BlockTimer(TrainerCallback):
    """Change a setting before each block of steps, in turn, and mark the blocks' ends on the device.

    Args:
        steps (`int`): how long a block is.
        skip (`int`): where the first begins.
        settings (`Mapping[str, Callable]`): by name, what is called before a block; the blocks take turns.
    """

    def __init__(self, steps: int, skip: int, settings: Mapping[str, Callable[[], Any]]) -> None:
        self.steps, self.skip, self.settings = steps, skip, settings
        self.starts = Marks()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.skip and state.global_step % self.steps == 0:
            list(self.settings.values())[len(self.starts.marks) % len(self.settings)]()
            self.starts.add()

    def milliseconds(self) -> dict[str, list[float]]:
        """A step of each block, by setting."""
        blocks = [block / self.steps for block in self.starts.milliseconds()]
        return {name: blocks[index :: len(self.settings)] for index, name in enumerate(self.settings)}


class StepTimer(TrainerCallback):
    """Time each step after the first `skip`, with the device's queue empty at its ends."""

    def __init__(self, skip: int) -> None:
        self.skip = skip
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.skip:
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    def median(self) -> float:
        """A hiccup of the machine is no step's cost: the median leaves it out."""
        return median(end - start for start, end in pairwise(self.ends))
