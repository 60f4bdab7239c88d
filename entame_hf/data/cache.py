"""Cache prepared images on disk, for the epochs, processes and runs that need them again."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray
from transformers.utils import logging
from xxhash import xxh3_64_intdigest

from .columns import image_files
from .images import DecodedImage
from .workers import start_in_threads, threads

logger = logging.get_logger(__name__)

# What is known of each image, at the start of the file; a checksum of 0 means that the image is not cached.
_INDEX = np.dtype([("checksum", "<u8"), ("content", "<u8"), ("ratio", "<f4"), ("unused", "<u4")])

# Bytes that a thread copies at a time.
_COPY_BYTES = 2**22
_FORMAT = "3"


def cache_folder() -> Path:
    """Return the folder of all caches: `entame_hf` beside the datasets that `datasets` caches."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "entame_hf"


def file_marks(dataset: Dataset, image_column: str) -> list[str]:
    """Tell the state of images that lie in files of their own, which may change under the same name."""
    lengths, files = image_files(dataset, image_column)
    paths = files.filter(pc.is_null(lengths)).drop_null().to_pylist()
    # Many at once: what lies on a network is waited for side by side.
    return list(threads().map(mark_files, (paths[i : i + 256] for i in range(0, len(paths), 256))))


def mark_files(paths: list[str]) -> str:
    """Tell the state of files."""
    return "\n".join(_state(path) for path in paths)


def _state(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return f"{path} missing"
    # Another file may come with the same size and time of modification.
    return f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def open_cache(parts: list[str], rows: int, length: int, limit: int) -> ImageCache | None:
    """Open the [`ImageCache`] of what decides the pixels; `None`, after a warning, where there can be none."""
    if limit <= 0 or not rows:
        return None
    key = hashlib.sha256("\n".join([_FORMAT, *parts]).encode(errors="surrogateescape")).hexdigest()[:32]
    try:
        return ImageCache(key, rows, length, limit)
    # Windows has no fcntl.
    except (ImportError, OSError) as error:
        logger.warning_once(f"The image cache cannot be used, so every epoch decodes all images: {error}")
        return None


class ImageCache:
    """Keep the pixels of images in a file, which the system holds in memory as far as it can.

    Processes may read and write the same file side by side: all of them write equal bytes, and a checksum that is
    written last tells which images are complete. It is compared at a process's first read of each image, so that bytes
    that changed on the disk are decoded again. The disk space is reserved before it is used.

    Args:
        key (`str`): identifies the pixels.
        rows (`int`): how many images the dataset has.
        length (`int`): bytes of an image.
        limit (`int`): bytes that all caches in the folder may take. Unused ones are removed to make room, oldest
            first. Half of the disk's free space is left free.

    Attributes:
        kept (`int`): how many images there is room for; the first ones.
        index (`numpy.ndarray`): of each image its checksum, the hash of its file and its ratio of width to height.
    """

    def __init__(self, key: str, rows: int, length: int, limit: int):
        import fcntl

        self._arguments = (key, rows, length, limit)
        self._length, self._start = length, -(-rows * _INDEX.itemsize // 4096) * 4096
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key}.images"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # A shared lock marks a file in use.
            fcntl.flock(self._file, fcntl.LOCK_SH)
            there = os.fstat(self._file).st_size
            wanted = self._start + rows * length
            room = limit - _make_room(folder, path, min(limit, wanted), limit)
            room = min(room, there + shutil.disk_usage(folder).free // 2)
            self.kept = max(0, min(rows, (max(room, there) - self._start) // length))
            size = self._start + self.kept * length
            if self.kept and size > there:
                self._reserve(there, size)
            os.utime(path)
        self.index: NDArray[np.void] = np.zeros(rows, _INDEX)
        self._pixels: NDArray[np.uint8] = np.empty((0, length), np.uint8)
        if self.kept:
            # Plain arrays: indexing a memmap is slower.
            mapped = np.asarray(np.memmap(path, np.uint8, "r", shape=(size,)))
            self.index = mapped[: rows * _INDEX.itemsize].view(_INDEX)
            self._pixels = mapped[self._start :].reshape(self.kept, length)
        self._checked = np.zeros(rows, bool)
        self._writing: list[Future[list[Any]]] = []
        if self.kept < rows:
            logger.warning(
                f"The image cache has room for {self.kept:,} of {rows:,} images; every epoch decodes the others. All "
                f"take {wanted / 1e9:.1f} GB: raise `image_cache_gb`, or free space on the disk of {folder}."
            )

    def __reduce__(self) -> tuple:
        return ImageCache, self._arguments

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def has(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which images are cached: bool (N,)."""
        return self.index["checksum"][rows] != 0

    def fraction(self) -> float:
        """Return the fraction of the dataset that is cached."""
        return float((self.index["checksum"] != 0).mean())

    def start_copying(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> list[Future[list[int]]]:
        """Start to copy cached images to `out`, uint8 (N, length), in threads; page faults need none of Python's lock.

        Returns:
            `list[Future]`: each gives the positions in `rows` whose pixels are damaged; they are no longer cached.
        """
        step = max(1, _COPY_BYTES // self._length)
        return [threads().submit(self._copy, rows, out, at, at + step) for at in range(0, len(rows), step)]

    def read(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy those images that are cached to `out`, uint8 (N, length); return which they are, bool (N,)."""
        here = self.has(rows)
        if here.all() and len(rows) > 1:
            damaged = [i for part in self.start_copying(rows, out) for i in part.result()]
        else:
            # A thread takes longer to wake up than to copy an image.
            damaged = [i for i in np.flatnonzero(here).tolist() if self._copy(rows, out, i, i + 1)]
        here[damaged] = False
        return here

    def write(self, row: int, image: DecodedImage) -> None:
        """Cache an image if there is room."""
        if row >= self.kept:
            return
        entry = np.array([(0, image.content, image.ratio, 0)], _INDEX)
        entry["checksum"] = _checksum(image.pixels, entry[0])
        try:
            # Not through the mapping, where a full disk ends the process.
            os.pwrite(self._file, image.pixels.data, self._start + row * self._length)
            os.pwrite(self._file, entry.data, row * _INDEX.itemsize)
        except OSError as error:
            logger.warning(f"The image cache cannot be written, so every epoch decodes the other images: {error}")
            self.kept = 0
        self._checked[row] = False

    def start_writing(self, images: Mapping[int, DecodedImage]) -> None:
        """Start to cache images by their rows, in threads, once those of the last call are written."""
        for part in self._writing:
            part.result()
        self._writing = start_in_threads(lambda each: self.write(*each), [*images.items()])

    def _copy(self, rows: NDArray[np.int64], out: NDArray[np.uint8], start: int, stop: int) -> list[int]:
        rows, out = rows[start:stop], out[start:stop]
        # Every mode but "raise" copies without a buffer.
        np.take(self._pixels, rows, axis=0, out=out, mode="clip")
        damaged = []
        for i in np.flatnonzero(~self._checked[rows]):
            entry = self.index[rows[i]]
            if _checksum(out[i], entry) == entry["checksum"]:
                self._checked[rows[i]] = True
            else:
                os.pwrite(self._file, bytes(_INDEX.itemsize), int(rows[i]) * _INDEX.itemsize)
                damaged.append(start + int(i))
        return damaged

    def _reserve(self, start: int, end: int) -> None:
        # macOS has none; a full disk shows there when an image is written.
        if not hasattr(os, "posix_fallocate"):
            return os.ftruncate(self._file, end)
        try:
            os.posix_fallocate(self._file, start, end - start)
        except OSError:
            os.ftruncate(self._file, start)
            raise


def _checksum(pixels: NDArray[np.uint8], entry: np.void) -> int:
    seed = int(entry["content"]) ^ int(entry["ratio"].view(np.uint32))
    return xxh3_64_intdigest(pixels.data, seed) or 1


def _make_room(folder: Path, own: Path, needed: int, limit: int) -> int:
    """Remove unused caches until `needed` bytes fit below the limit; return the bytes of the others."""
    import fcntl

    # Former versions wrote records; unpacked archives lie beside them.
    others = [path for suffix in ("images", "records") for path in folder.glob(f"*.{suffix}") if path != own]
    others.sort(key=lambda path: path.stat().st_mtime)
    taken = sum(path.stat().st_size for path in others)
    for path in others:
        if taken + needed <= limit:
            break
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            taken -= path.stat().st_size
            path.unlink()
    return taken
