"""Threads and processes that decode images."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .batches import CAN_FORK, thread_pool
from .board import TO_DO, Board, Fetch, Files, Rest, work
from .images import DecodedImage, EncodedImage, UnreadableImageError

logger = logging.getLogger(__name__)

Decode = Callable[[int, Any], DecodedImage | UnreadableImageError]
Read = Callable[[Any], EncodedImage | None]

# 12 processes decode 4,500 images of 500×375 pixels a second beside a training, and two thirds of that are more than
# most GPUs train on. With nvJPEG, which takes the GPU's time, ResNet-50 keeps 0.89 of its pace on an H200; with 14
# processes, 0.99.
_MANY = 8


def cores() -> int:
    """Count the cores that this process may use: its fraction of them if several ranks share the machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def default_workers() -> int:
    """Count the processes that decode by default: an eighth of the cores is left to the training."""
    return cores() - cores() // 8


def threads() -> ThreadPoolExecutor:
    """Return this process's threads, one a core."""
    return _threads(os.getpid())


def in_threads(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Call a function for many values in threads, a few tasks a thread, and return the results in their order."""
    return [result for part in start_in_threads(function, values) for result in part.result()]


def start_in_threads(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Future[list[Any]]]:
    """Start to call a function for many values in threads; each `Future` has the results of some, in order."""
    step = max(1, -(-len(values) // (4 * cores())))
    parts = [values[start : start + step] for start in range(0, len(values), step)]
    return [threads().submit(lambda part: [*map(function, part)], part) for part in parts]


# A forked process has none of its parent's threads.
@cache
def _threads(process: int) -> ThreadPoolExecutor:
    return thread_pool(cores(), "decode")


def _close(board: Board, count: int, process: int) -> None:
    # A copy in a forked process is not the one that they work for.
    if os.getpid() == process:
        board.close(count)


class Workers:
    """Decode images in forked processes once they are started, else in threads.

    Pillow and image processors hold Python's lock for most of the time that a small image takes. Processes have the
    decoder as it is when they start. They share memory with this process and exchange no messages with it: each would
    wait for Python's lock, which the training holds.

    Args:
        decode (`Callable`): Maps a row's number and its image to a [`DecodedImage`], or to the error if there is none.
        length (`int`): The bytes of a decoded image.
        fetch (`Callable`, *optional*): Maps the numbers of rows, int64 (N,), to their images. Without it, `values` are
            given with the rows.
        read (`Callable`, *optional*): Maps an image to an [`EncodedImage`] if a GPU can decode it, else to `None`.
    """

    def __init__(self, decode: Decode, length: int, fetch: Fetch | None = None, read: Read | None = None):
        self.decode, self.length, self.fetch, self.read = decode, length, fetch, read
        self._board: Board | None = None
        self.processes: list[Any] = []

    @cached_property
    def files(self) -> Files:
        """Memory through which a process that reads a stream hands over its files."""
        return Files()

    def start(self, count: int) -> None:
        """Start processes, if none run and the system can fork."""
        if not count or self._board is not None or not CAN_FORK:
            return
        for_gpu = self.read is not None and count < _MANY and torch.cuda.is_available()
        self._board = Board(self.length, None if self.fetch else self.files, for_gpu)
        collects = gc.isenabled()
        # A collection in a fork, before it begins, would end what the parent no longer uses: process groups, streams.
        gc.disable()
        try:
            self.processes = [self._fork(self._board, for_gpu) for _ in range(count)]
        finally:
            if collects:
                gc.enable()
        # They end with the last reference to this object.
        self._close = weakref.finalize(self, _close, self._board, count, os.getpid())
        self._close.atexit = False

    def _fork(self, board: Board, for_gpu: bool) -> Any:
        # Threads that feed a GPU come first, most of all where it decodes. A training on the cores would wait for
        # images, and be 4 % slower.
        niceness = (19 if for_gpu else 10) if torch.cuda.is_available() else 0
        process = multiprocessing.get_context("fork").Process(
            target=work, args=(board, self._take, self.fetch, os.getpid(), niceness), daemon=True
        )
        process.start()
        return process

    @property
    def outrun_gpu(self) -> bool:
        """Whether as many processes run as decode faster than a GPU that trains meanwhile."""
        return len(self.processes) >= _MANY

    def stop(self) -> None:
        """Stop the processes: the training process is slower beside processes that were forked from it."""
        if self._board is not None:
            self._close()
            self._board, self.processes = None, []

    def start_decoding(
        self,
        pixels: NDArray[np.uint8],
        ratios: NDArray[np.float32],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        values: Sequence[Any] = (),
        for_gpu: bool = False,
    ) -> Callable[[], list[tuple[int, Rest]]]:
        """Start to decode images to their positions in a batch of pixels and ratios, or to read them for a GPU.

        Returns:
            `Callable`: Waits for them, and returns the rest: the numbers in `rows` of those that cannot be decoded,
                with the errors, and of those that a GPU decodes, with their files.
        """
        board, processes, found = self._board, self.processes, np.full(len(rows), TO_DO, np.float32)
        part = None if board is None else board.post(rows, values, for_gpu)

        def take(i: int, image: Any) -> tuple[int, Rest] | None:
            taken = self._take(int(rows[i]), image, for_gpu)
            if not isinstance(taken, DecodedImage):
                return i, taken
            pixels[positions[i]], found[i] = taken.pixels, taken.ratio
            return None

        def finish() -> list[tuple[int, Rest]]:
            rest: list[tuple[int, Rest] | None] = []
            if board is not None and part is not None:
                if not board.wait(part, processes) and self._board is board:
                    logger.warning("A worker that decodes images was killed; is memory short? Threads decode instead.")
                    self._board, self.processes = None, []
                rest += board.take(part, pixels, positions, found)
            left = np.flatnonzero(found == TO_DO)
            if len(left):
                images = self.fetch(rows[left]) if self.fetch else [values[i] for i in left.tolist()]
                rest += in_threads(lambda each: take(*each), [*zip(left.tolist(), images, strict=True)])
            ratios[positions] = np.maximum(found, 0)
            return [each for each in rest if each]

        return finish

    def _take(self, row: int, value: Any, for_gpu: bool) -> DecodedImage | Rest:
        encoded = self.read(value) if for_gpu and self.read else None
        return self.decode(row, value) if encoded is None else encoded

    def __getstate__(self) -> dict[str, Any]:
        return {"decode": self.decode, "length": self.length, "fetch": self.fetch, "read": self.read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
