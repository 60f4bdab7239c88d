"""Memory through which a training hands images to the processes that decode them, and gets their pixels."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .images import DecodedImage, EncodedImage, UnreadableImageError

# Images that a process takes at a time, to decode them or to read them for a GPU: that is quick, and each process that
# is woken takes a core from the training.
_CHUNK, _FILES_CHUNK = 8, 64
# Room for the error of a small image, and for most files that a GPU decodes.
_LEAST_PLACE, _FILE_PLACE = 4096, 2**19
# Shared memory for batches that are decoded at the same time, and what each of them may use.
_PARTS, _PART_BYTES = 3, 2**28
# Shared memory for the files of a stream: slots, how many one pass over it takes, and the bytes of a slot.
_SLOTS, _SLOTS_OF_A_PASS, _SLOT_BYTES = 64, 32, 2**23
# Where a process finds what it decodes: among the inputs, there pickled, or in the files of a stream.
_INPUTS, _PICKLED, _FILES = range(3)
# Ratios of images that are not decoded yet, and of those whose place holds a file for a GPU, or an error.
TO_DO, _ENCODED, _ERROR = -1.0, -2.0, -3.0

# What is left of an image: why it cannot be decoded, or its file, for a GPU.
Rest = UnreadableImageError | EncodedImage
# Takes a row's number, its image, and whether a GPU decodes.
Take = Callable[[int, Any, bool], DecodedImage | Rest]
Fetch = Callable[[NDArray[np.int64]], Sequence[Any]]


class Files:
    """Hold the files of a stream in slots of memory that forked processes share."""

    def __init__(self) -> None:
        self.memory = _shared((_SLOTS, _SLOT_BYTES), np.uint8)
        self._free = [*range(_SLOTS)]

    @contextmanager
    def lend(self) -> Iterator[Slots]:
        """Lend slots to one pass. Those that are still shown when it ends are free once nobody refers to them."""
        lent = self._free[:_SLOTS_OF_A_PASS]
        # Another thread may have freed one more meanwhile.
        del self._free[: len(lent)]
        slots = Slots(self.memory, lent)
        try:
            yield slots
        finally:
            slots.give_back(self._free)


class Slots:
    """Hand files from the process that reads a stream to this one, in slots of shared memory.

    torch's own needs /dev/shm, which containers keep small.
    """

    def __init__(self, memory: NDArray[np.uint8], numbers: Sequence[int]) -> None:
        self._memory, self._hidden = memory, set(numbers)
        self._free: Any = multiprocessing.get_context("fork").SimpleQueue()
        for number in numbers:
            self._free.put(number)
        self._owner: list[int] | None = None
        # Any thread may be the last one that refers to a slot, also while it holds the lock.
        self._lock = threading.RLock()

    def write(self, files: list[bytes]) -> int | bytes:
        """Put files into a free slot and return its number; if there is none, or they are too large, themselves."""
        length = sum(map(len, files))
        if not 0 < length <= self._memory.shape[1] or self._free.empty():
            return b"".join(files)
        slot: int = self._free.get()
        np.concatenate([np.frombuffer(file, np.uint8) for file in files], out=self._memory[slot, :length])
        return slot

    def read(self, sent: int | bytes) -> memoryview:
        """Show what was written. A slot is free again once nobody refers to any part of it."""
        if isinstance(sent, bytes):
            return memoryview(sent)
        shown = self._memory[sent]
        self._hidden.remove(sent)
        weakref.finalize(shown, self._put_back, sent).atexit = False
        return memoryview(shown)

    def give_back(self, owner: list[int]) -> None:
        """Give the slots to a list of free ones; those that are shown follow."""
        with self._lock:
            self._owner = owner
            owner.extend(self._hidden)

    def _put_back(self, slot: int) -> None:
        with self._lock:
            if self._owner is None:
                self._hidden.add(slot)
                self._free.put(slot)
            else:
                self._owner.append(slot)


class Board:
    """Hold what processes are to decode, and what they decoded, in memory that forked processes share.

    An image's place holds its pixels, its file for a GPU, or a pickled error. `files` are where those of a stream are;
    without them, no images are given with their rows. With `for_gpu`, places have room for most files.
    """

    def __init__(self, length: int, files: Files | None = None, for_gpu: bool = False) -> None:
        self.length, place = length, max(length, _FILE_PLACE if for_gpu else _LEAST_PLACE)
        self.images = max(1, _PART_BYTES // place)
        self.places = _shared((_PARTS, self.images, place), np.uint8)
        self.files = np.empty(0, np.uint8) if files is None else files.memory.reshape(-1)
        # What else images are decoded from, one after the other; of each, where it starts and ends, and what it is.
        self.inputs = _shared((_PARTS, 1 if files is None else _PART_BYTES), np.uint8)
        self.spans = _shared((_PARTS, self.images, 3), np.int64)
        self.rows, self.ratios = (_shared((_PARTS, self.images), kind) for kind in (np.int64, np.float32))
        # Of files for a GPU, the bytes, and the height and width of the image.
        self.encoded = _shared((_PARTS, self.images, 3), np.int64)
        # Pieces of work: a part, its first image and the one after its last.
        self.chunks = _shared((_PARTS * -(-self.images // _CHUNK), 3), np.int64)
        # How many chunks were offered, and how many were taken.
        self.posted, self.taken = _shared((1,), np.int64), _shared((1,), np.int64)
        # Images of each part that are left to do, and whether a GPU decodes them.
        self.left, self.for_gpu = _shared((_PARTS,), np.int64), _shared((_PARTS,), np.bool_)
        fork = multiprocessing.get_context("fork")
        self.lock, self.ready = fork.Lock(), fork.Semaphore(0)
        self.done = [fork.Semaphore(0) for _ in range(_PARTS)]
        self._counts = [0] * _PARTS
        self._free: SimpleQueue[int] = SimpleQueue()
        for part in range(_PARTS):
            self._free.put(part)

    def post(self, rows: NDArray[np.int64], values: Sequence[Any], for_gpu: bool) -> int | None:
        """Offer images to the processes, as many as a part holds, and return the part."""
        count = min(len(rows), self.images)
        if not count:
            return None
        part = self._free.get()
        if values:
            count = self._give(part, values[:count])
        if not count:
            self._free.put(part)
            return None
        self.rows[part, :count] = rows[:count]
        self.ratios[part, :count], self.left[part], self._counts[part] = TO_DO, count, count
        self.for_gpu[part] = for_gpu
        chunk = _FILES_CHUNK if for_gpu else _CHUNK
        for start in range(0, count, chunk):
            self.chunks[self.posted[0] % len(self.chunks)] = part, start, min(start + chunk, count)
            self.posted[0] += 1
            self.ready.release()
        return part

    def _give(self, part: int, values: Sequence[Any]) -> int:
        """Give images to the processes, and return how many there was room for."""
        first, end = self.files.__array_interface__["data"][0], 0
        for i, value in enumerate(values):
            data = value.get("bytes") if isinstance(value, dict) else None
            kind = _PICKLED if data is None else _INPUTS
            file = np.frombuffer(pickle.dumps(value) if data is None else data, np.uint8)
            start = file.__array_interface__["data"][0] - first
            if 0 <= start < self.files.size:
                self.spans[part, i] = start, start + len(file), _FILES
                continue
            start, end = end, end + len(file)
            if end > self.inputs.shape[1]:
                return i
            self.inputs[part, start:end] = file
            self.spans[part, i] = start, end, kind
        return len(values)

    def wait(self, part: int, processes: list[Any]) -> bool:
        """Wait until a part is decoded; return `False`, with all processes ended, if one was killed."""
        while not self.done[part].acquire(timeout=0.2):
            # Those that a closed board let go have exit code 0.
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
                    process.join()
                return False
        return True

    def take(
        self, part: int, pixels: NDArray[np.uint8], positions: NDArray[np.int64], found: NDArray[np.float32]
    ) -> list[tuple[int, Rest]]:
        """Copy what was decoded, and return the rest; the part is free then."""
        count = self._counts[part]
        found[:count] = self.ratios[part, :count]
        good = np.flatnonzero(found >= 0)
        places = self.places[part, :, : self.length]
        if len(good) == len(pixels) and np.array_equal(positions, good):
            np.copyto(pixels, places[:count])
        else:
            pixels[positions[good]] = places[good]
        rest: list[tuple[int, Rest]] = [*self._copy_files(part, np.flatnonzero(found == _ENCODED))]
        # What follows in a place does not count.
        rest += [(i, pickle.loads(self.places[part, i].data)) for i in np.flatnonzero(found == _ERROR).tolist()]
        self._free.put(part)
        return rest

    def _copy_files(self, part: int, numbers: NDArray[np.int64]) -> Iterator[tuple[int, EncodedImage]]:
        if not len(numbers):
            return
        # In few calls: each takes Python's lock from the training.
        lengths, heights, widths = self.encoded[part, numbers].T.tolist()
        places = torch.from_numpy(self.places[part]).unbind()
        files = torch.cat([places[i][:length] for i, length in zip(numbers.tolist(), lengths, strict=True)])
        for i, file, *size in zip(numbers.tolist(), files.split(lengths), heights, widths, strict=True):
            yield i, EncodedImage(file.numpy(), *size)

    def serve(self, take: Take, fetch: Fetch | None, parent: int) -> None:
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
                values = fetch(rows) if fetch else [self._value(part, i) for i in range(start, end)]
                for i, row, value in zip(range(start, end), rows.tolist(), values, strict=True):
                    self._put(part, i, take(row, value, bool(self.for_gpu[part])))
            with self.lock:
                self.left[part] -= end - start
                last = not self.left[part]
            if last:
                self.done[part].release()

    def _value(self, part: int, i: int) -> Any:
        start, end, kind = self.spans[part, i].tolist()
        data = (self.files if kind == _FILES else self.inputs[part])[start:end].tobytes()
        return pickle.loads(data) if kind == _PICKLED else {"bytes": data, "path": None}

    def _put(self, part: int, i: int, image: DecodedImage | Rest) -> None:
        place = self.places[part, i]
        if isinstance(image, DecodedImage):
            place[: self.length], self.ratios[part, i] = image.pixels, image.ratio
            return
        if isinstance(image, EncodedImage):
            data, kind = image.file, _ENCODED
            self.encoded[part, i] = len(data), image.height, image.width
        else:
            data, kind = np.frombuffer(pickle.dumps(image), np.uint8), _ERROR
        # Threads do what has no room here.
        if len(data) <= len(place):
            place[: len(data)], self.ratios[part, i] = data, kind

    def close(self, count: int) -> None:
        """Let so many processes end after what was offered."""
        for _ in range(count):
            self.ready.release()


def _shared(shape: tuple[int, ...], dtype: type) -> NDArray[Any]:
    """Allocate zeros that forked processes share."""
    length = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, length), dtype).reshape(shape)


def work(board: Board, take: Take, fetch: Fetch | None, parent: int, niceness: int) -> None:
    """Decode what a board offers, in a process that was forked to, with so much less of a claim to the cores."""
    gc.freeze()
    gc.enable()
    # The main process handles Ctrl-C and ends this one. A forked process has none of torch's threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.nice(niceness)
    board.serve(take, fetch, parent)
