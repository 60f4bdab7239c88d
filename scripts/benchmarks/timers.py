"""Callbacks that time a training."""

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
    """Note when some steps end, with the device's queue empty."""

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
    """Mark times on a device without waiting for it."""

    def __init__(self) -> None:
        self.marks: list[Any] = []

    def add(self) -> None:
        if torch.cuda.is_available():
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Return the time between each mark and the next."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return [start.elapsed_time(end) for start, end in pairwise(self.marks)]
        return [1e3 * (end - start) for start, end in pairwise(self.marks)]


class EpochTimer(TrainerCallback):
    """Mark the ends of epochs. Waiting between two epochs counts for the later one."""

    def __init__(self) -> None:
        self.ends = Marks()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ends.add()


class EpochTurns(TrainerCallback):
    """Let several trainings train for one epoch each, in turn, and time these epochs.

    Args:
        file (`Path`): Grows by a byte when a training is ready, and by one at the end of each turn.
        place (`int`): This training's place in a round.
        count (`int`): The number of trainings.
        warm_up (`int`): The number of epochs before the first turn.
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
    """Time blocks of steps on the device, with the next setting in each block.

    Args:
        steps (`int`): The number of steps in a block.
        skip (`int`): The step at which the first block starts.
        settings (`Mapping[str, Callable]`): Functions that apply a setting before a block, by name.
    """

    def __init__(self, steps: int, skip: int, settings: Mapping[str, Callable[[], Any]]) -> None:
        self.steps, self.skip, self.settings = steps, skip, settings
        self.starts = Marks()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.skip and state.global_step % self.steps == 0:
            list(self.settings.values())[len(self.starts.marks) % len(self.settings)]()
            self.starts.add()

    def milliseconds(self) -> dict[str, list[float]]:
        """Return the time of a step in each block, by setting."""
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
        """Return the median time of a step, which leaves out the machine's hiccups."""
        return median(end - start for start, end in pairwise(self.ends))
