"""Threads and processes that decode images."""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .batches import CAN_FORK, thread_pool
from .images import DecodedImage, UnreadableImageError

logger = logging.getLogger(__name__)

# ResNet-50 at 224 px, without a cache, on an H200: 16 processes keep 0.84 of the pace of images on the device. nvJPEG,
# which takes the GPU's time, keeps 0.57.
_MANY = 8
# Rows that a process gets at a time.
_CHUNK = 4
# Shared memory for batches that are decoded at the same time, and what each of them may use.
_PARTS, _PART_BYTES = 3, 2**28
Part = tuple[int, NDArray[np.uint8]]
_work: tuple[Callable[[int, Any], Any], NDArray[np.uint8]]


def cores() -> int:
    """Count the cores that this process may use: its fraction of them if several ranks share the machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def threads() -> ThreadPoolExecutor:
    """Return this process's threads, one a core."""
    return _threads(os.getpid())


def in_threads(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Call a function for many values in threads, a few tasks a thread, and return the results in their order."""
    step = max(1, -(-len(values) // (4 * cores())))
    parts = [values[start : start + step] for start in range(0, len(values), step)]
    return [result for part in threads().map(lambda part: [*map(function, part)], parts) for result in part]


# A forked process has none of its parent's threads.
@cache
def _threads(process: int) -> ThreadPoolExecutor:
    return thread_pool(cores(), "decode")


class Workers:
    """Decode images in forked processes once they are started, else in threads.

    Pillow and image processors hold Python's lock for most of the time that a small image takes. Processes have the
    decoder as it is when they start, and share with this one the memory to which they decode.

    Args:
        decode (`Callable`): Maps a row's number and its image to a [`DecodedImage`], or to the error if there is none.
        length (`int`): The bytes of a decoded image.
    """

    def __init__(self, decode: Callable[[int, Any], DecodedImage | UnreadableImageError], length: int):
        self.decode, self.length = decode, length
        self.pool: ProcessPoolExecutor | None = None
        self.count = 0
        self._free: SimpleQueue[Part] = SimpleQueue()

    def start(self, count: int) -> None:
        """Start processes, if none run and the system can fork."""
        if not count or self.pool is not None or not CAN_FORK:
            return
        images = max(1, _PART_BYTES // self.length)
        memory = mmap.mmap(-1, _PARTS * images * self.length)
        shared = np.frombuffer(memory, np.uint8).reshape(_PARTS, images, self.length)
        self._free = SimpleQueue()
        for number, part in enumerate(shared):
            self._free.put((number, part))
        self.pool, self.count = _fork((self.decode, shared), count), count

    @property
    def outrun_gpu(self) -> bool:
        """Whether as many processes run as decode faster than a GPU that trains meanwhile."""
        return self.pool is not None and self.count >= _MANY

    def stop(self) -> None:
        """Stop the processes: the training process is slower beside processes that were forked from it."""
        if self.pool is not None:
            self.pool.shutdown(wait=False)
            self.pool, self._free = None, SimpleQueue()

    def start_decoding(
        self,
        pixels: NDArray[np.uint8],
        ratios: NDArray[np.float32],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        values: list[Any],
    ) -> Callable[[], list[tuple[int, UnreadableImageError]]]:
        """Start to decode images to their positions in a batch of pixels and ratios.

        Returns:
            `Callable`: Waits for them, and returns the numbers in `values` of those that cannot be decoded.
        """
        numbers, free = rows.tolist(), self._free
        part, futures = self._submit(numbers, values)

        def decode(i: int) -> float | UnreadableImageError:
            return _decode_to(pixels[positions[i]], self.decode(numbers[i], values[i]))

        def finish() -> list[tuple[int, UnreadableImageError]]:
            results: list[float | UnreadableImageError] = []
            if part is not None:
                try:
                    results = [result for future in futures for result in future.result()]
                    pixels[positions[: len(results)]] = part[1][: len(results)]
                except BrokenProcessPool:
                    logger.warning("A worker that decodes images was killed; is memory short? Threads decode instead.")
                    self.pool = None
                finally:
                    free.put(part)
            results += in_threads(decode, range(len(results), len(values)))
            errors = [(i, result) for i, result in enumerate(results) if isinstance(result, UnreadableImageError)]
            ratios[positions] = [0.0 if isinstance(result, UnreadableImageError) else result for result in results]
            return errors

        return finish

    def _submit(self, rows: list[int], values: list[Any]) -> tuple[Part | None, list[Future]]:
        """Let processes decode as many images as a part of the shared memory holds."""
        if self.pool is None:
            return None, []
        free = self._free
        number, images = part = free.get()
        count = min(len(rows), len(images))
        chunks = [slice(at, min(at + _CHUNK, count)) for at in range(0, count, _CHUNK)]
        try:
            return part, [self.pool.submit(_run, number, at.start, rows[at], values[at]) for at in chunks]
        # Another thread has stopped them.
        except (AttributeError, RuntimeError):
            free.put(part)
            return None, []

    def __getstate__(self) -> dict[str, Any]:
        return {"decode": self.decode, "length": self.length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def _fork(work: tuple[Any, NDArray[np.uint8]], count: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(work, os.getpid()))
    collects = gc.isenabled()
    # A collection in a fork, before it begins, would end what the parent no longer uses: process groups, streams.
    gc.disable()
    try:
        # The first task starts all of them: now, in the caller's thread.
        pool.submit(int).result()
    finally:
        if collects:
            gc.enable()
    return pool


def _run(part: int, start: int, rows: list[int], values: list[Any]) -> list[float | UnreadableImageError]:
    decode, shared = _work
    places = shared[part, start : start + len(rows)]
    return [_decode_to(*each) for each in zip(places, map(decode, rows, values), strict=True)]


def _decode_to(place: NDArray[np.uint8], image: DecodedImage | UnreadableImageError) -> float | UnreadableImageError:
    if isinstance(image, UnreadableImageError):
        return image
    place[:] = image.pixels
    return image.ratio


def _begin(work: tuple[Any, NDArray[np.uint8]], parent: int) -> None:
    global _work
    _work = work
    gc.freeze()
    gc.enable()
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    # The main process handles Ctrl-C, and a forked process has none of torch's threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _exit_with(parent: int) -> None:
    """End this process once its parent has ended: a parent that is killed tells nobody."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
