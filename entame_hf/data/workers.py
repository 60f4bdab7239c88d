"""Threads and processes that decode images."""

from __future__ import annotations

import gc
import logging
import mmap
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
# Images that a process takes at a time.
_CHUNK = 8
# Room for what a small image is decoded from: its path, say.
_LEAST_PLACE = 4096
# Shared memory for batches that are decoded at the same time, and what each of them may use.
_PARTS, _PART_BYTES = 3, 2**28
# Ratios of images that are not decoded yet, and of those that cannot be.
_TO_DO, _UNREADABLE = -1.0, -2.0


Decode = Callable[[int, Any], DecodedImage | UnreadableImageError]
Fetch = Callable[[NDArray[np.int64]], Sequence[Any]]


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
    decoder as it is when they start. They share memory with this process and exchange no messages with it: each would
    wait for Python's lock, which the training holds.

    Args:
        decode (`Callable`): Maps a row's number and its image to a [`DecodedImage`], or to the error if there is none.
        length (`int`): The bytes of a decoded image.
        fetch (`Callable`, *optional*): Maps the numbers of rows, int64 (N,), to their images. Without it, images are
            given with the rows.
    """

    def __init__(self, decode: Decode, length: int, fetch: Fetch | None = None):
        self.decode, self.length, self.fetch = decode, length, fetch
        self._board: _Board | None = None
        self.processes: list[Any] = []

    def start(self, count: int) -> None:
        """Start processes, if none run and the system can fork."""
        if not count or self._board is not None or not CAN_FORK:
            return
        self._board = _Board(self.length)
        collects = gc.isenabled()
        # A collection in a fork, before it begins, would end what the parent no longer uses: process groups, streams.
        gc.disable()
        try:
            self.processes = [self._fork(self._board) for _ in range(count)]
        finally:
            if collects:
                gc.enable()

    def _fork(self, board: _Board) -> Any:
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(board, self.decode, self.fetch, os.getpid()), daemon=True
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
            self._board.close(len(self.processes))
            self._board, self.processes = None, []

    def start_decoding(
        self,
        pixels: NDArray[np.uint8],
        ratios: NDArray[np.float32],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        values: Sequence[Any] | None = None,
    ) -> Callable[[], list[tuple[int, UnreadableImageError]]]:
        """Start to decode images to their positions in a batch of pixels and ratios.

        Returns:
            `Callable`: Waits for them, and returns the numbers in `rows` of those that cannot be decoded.
        """
        board, processes, found = self._board, self.processes, np.full(len(rows), _TO_DO, np.float32)
        part = None if board is None else board.post(rows, values)

        def finish() -> list[tuple[int, UnreadableImageError]]:
            errors: list[tuple[int, UnreadableImageError]] = []
            if board is not None and part is not None:
                if not board.wait(part, processes) and self._board is board:
                    logger.warning("A worker that decodes images was killed; is memory short? Threads decode instead.")
                    self._board, self.processes = None, []
                errors += board.take(part, pixels, positions, found)
            left = np.flatnonzero(found == _TO_DO)
            errors += self._decode_in_threads(left, pixels, positions, rows, values, found) if len(left) else []
            ratios[positions] = np.maximum(found, 0)
            return errors

        return finish

    def _decode_in_threads(
        self,
        left: NDArray[np.int64],
        pixels: NDArray[np.uint8],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        values: Sequence[Any] | None,
        found: NDArray[np.float32],
    ) -> list[tuple[int, UnreadableImageError]]:
        images = [values[i] for i in left] if self.fetch is None or values is not None else self.fetch(rows[left])

        def decode(n: int) -> tuple[int, UnreadableImageError] | None:
            i = int(left[n])
            image = self.decode(int(rows[i]), images[n])
            if isinstance(image, UnreadableImageError):
                return i, image
            pixels[positions[i]], found[i] = image.pixels, image.ratio
            return None

        return [error for error in in_threads(decode, range(len(left))) if error]

    def __getstate__(self) -> dict[str, Any]:
        return {"decode": self.decode, "length": self.length, "fetch": self.fetch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class _Board:
    """Hold what processes are to decode, and what they decoded, in memory that forked processes share.

    An image's place holds what it is decoded from, pickled, then its pixels or the error.
    """

    def __init__(self, length: int) -> None:
        self.length, place = length, max(length, _LEAST_PLACE)
        self.images = max(1, _PART_BYTES // place)
        self.places = _shared((_PARTS, self.images, place), np.uint8)
        self.rows, self.sizes = (_shared((_PARTS, self.images), np.int64) for _ in range(2))
        self.ratios = _shared((_PARTS, self.images), np.float32)
        # Pieces of work: a part, its first image and the one after its last.
        self.chunks = _shared((_PARTS * -(-self.images // _CHUNK), 3), np.int64)
        # How many chunks were offered, and how many were taken.
        self.posted, self.taken = _shared((1,), np.int64), _shared((1,), np.int64)
        # Images of each part that are left to do.
        self.left = _shared((_PARTS,), np.int64)
        fork = multiprocessing.get_context("fork")
        self.lock, self.ready = fork.Lock(), fork.Semaphore(0)
        self.done = [fork.Semaphore(0) for _ in range(_PARTS)]
        self._counts = [0] * _PARTS
        self._free: SimpleQueue[int] = SimpleQueue()
        for part in range(_PARTS):
            self._free.put(part)

    def post(self, rows: NDArray[np.int64], values: Sequence[Any] | None) -> int | None:
        """Offer images to the processes, as many as a part holds, and return the part."""
        count = min(len(rows), self.images)
        written = [] if values is None else [_written(value) for value in values[:count]]
        # An encoded image can be larger than its pixels; threads decode it, and what comes after it.
        large = (i for i, (data, _) in enumerate(written) if len(data) > self.places.shape[2])
        count = next(large, count)
        if not count:
            return None
        part = self._free.get()
        for i, (data, size) in enumerate(written[:count]):
            self.places[part, i, : len(data)], self.sizes[part, i] = data, size
        if values is None:
            self.sizes[part, :count] = 0
        self.rows[part, :count] = rows[:count]
        self.ratios[part, :count], self.left[part], self._counts[part] = _TO_DO, count, count
        for start in range(0, count, _CHUNK):
            self.chunks[self.posted[0] % len(self.chunks)] = part, start, min(start + _CHUNK, count)
            self.posted[0] += 1
            self.ready.release()
        return part

    def wait(self, part: int, processes: list[Any]) -> bool:
        """Wait until a part is decoded; return `False`, with all processes ended, if one was killed."""
        while not self.done[part].acquire(timeout=1):
            if not all(process.is_alive() for process in processes):
                for process in processes:
                    process.kill()
                    process.join()
                return False
        return True

    def take(
        self, part: int, pixels: NDArray[np.uint8], positions: NDArray[np.int64], found: NDArray[np.float32]
    ) -> list[tuple[int, UnreadableImageError]]:
        """Copy what was decoded, and return the errors; the part is free then."""
        count = self._counts[part]
        found[:count] = self.ratios[part, :count]
        good = np.flatnonzero(found >= 0)
        places = self.places[part, :, : self.length]
        if len(good) == len(pixels) and np.array_equal(positions, good):
            np.copyto(pixels, places[:count])
        else:
            pixels[positions[good]] = places[good]
        failed = np.flatnonzero(found == _UNREADABLE).tolist()
        errors = [(i, pickle.loads(self.places[part, i, : self.sizes[part, i]])) for i in failed]
        self._free.put(part)
        return errors

    def work(self, decode: Decode, fetch: Fetch | None, parent: int) -> None:
        """Decode chunks until the board is closed or the parent process has ended."""
        # A parent that is killed tells nobody.
        while os.getppid() == parent:
            if not self.ready.acquire(timeout=1):
                continue
            with self.lock:
                # Closed.
                if self.taken[0] == self.posted[0]:
                    return
                part, start, end = self.chunks[self.taken[0] % len(self.chunks)].tolist()
                self.taken[0] += 1
            # Of what fails here, a thread meets the error again, and raises it.
            with suppress(Exception):
                rows = self.rows[part, start:end]
                values = fetch(rows) if fetch and not self.sizes[part, start] else self._values(part, start, end)
                for i, row, value in zip(range(start, end), rows.tolist(), values, strict=True):
                    self._put(part, i, decode(row, value))
            with self.lock:
                self.left[part] -= end - start
                last = not self.left[part]
            if last:
                self.done[part].release()

    def _values(self, part: int, start: int, end: int) -> list[Any]:
        places, sizes = self.places[part, start:end], self.sizes[part, start:end].tolist()
        return [
            {"bytes": place[:size].tobytes(), "path": None} if size > 0 else pickle.loads(place[:-size])
            for place, size in zip(places, sizes, strict=True)
        ]

    def _put(self, part: int, i: int, image: DecodedImage | UnreadableImageError) -> None:
        place = self.places[part, i]
        if isinstance(image, UnreadableImageError):
            error = np.frombuffer(pickle.dumps(image), np.uint8)
            place[: len(error)], self.sizes[part, i] = error, len(error)
            self.ratios[part, i] = _UNREADABLE
        else:
            place[: self.length], self.ratios[part, i] = image.pixels, image.ratio

    def close(self, count: int) -> None:
        """Let so many processes end after what was offered."""
        for _ in range(count):
            self.ready.release()


def _shared(shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """Allocate zeros that forked processes share."""
    length = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, length), dtype).reshape(shape)


def _written(value: Any) -> tuple[NDArray[np.uint8], int]:
    """Give what a process reads an image from, and its length: below 0 if it is pickled."""
    data = value.get("bytes") if isinstance(value, dict) else None
    if data:
        return np.frombuffer(data, np.uint8), len(data)
    pickled = pickle.dumps(value)
    return np.frombuffer(pickled, np.uint8), -len(pickled)


def _work(board: _Board, decode: Decode, fetch: Fetch | None, parent: int) -> None:
    gc.freeze()
    gc.enable()
    # The main process handles Ctrl-C and ends this one. A forked process has none of torch's threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    board.work(decode, fetch, parent)
