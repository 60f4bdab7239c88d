"""Keep prepared images, for the epochs, processes and runs that need them again."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from concurrent.futures import Future
from pathlib import Path

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers.utils import logging

from .workers import threads

logger = logging.get_logger(__name__)

_BOOT = Path("/proc/sys/kernel/random/boot_id")

_SUFFIX = ".records"

# Bytes that a thread copies at a time.
_PART = 2**22


def cache_folder() -> Path:
    """Give the folder of all caches: `entame_hf` beside the datasets that `datasets` caches (`HF_DATASETS_CACHE`)."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "entame_hf"


def this_boot() -> str:
    """Identify this machine since its start: what it wrote may be lost in a crash, and no other may share it."""
    return _BOOT.read_text() if _BOOT.exists() else str(uuid.getnode())


def open_cache(parts: list[str], rows: int, length: int, limit: int) -> RecordCache | None:
    """Open a [`RecordCache`] for this boot of this machine.

    Args:
        parts (`list[str]`): what the records depend on.
        rows, length, limit: as for [`RecordCache`].

    Returns:
        [`RecordCache`] or `None`: `None`, after a warning, where there can be none.
    """
    if limit <= 0 or not rows:
        return None
    key = hashlib.sha256("\n".join([*parts, this_boot()]).encode()).hexdigest()[:32]
    try:
        return RecordCache(key, rows, length, limit)
    except (ImportError, OSError) as error:
        logger.warning(f"Images are decoded in every epoch, because the image cache cannot be used: {error}")
        return None


class RecordCache:
    """Keep records of equal length in a file, of which the system holds in memory what it has room for.

    Processes of one machine may read and write side by side: who writes a record writes the bytes that any other
    would, and the last of them, which are never zero, say that it is whole.

    Args:
        key (`str`): What the records are: the same key, the same records.
        rows (`int`): How many there are.
        length (`int`): Bytes of a record.
        limit (`int`): Bytes that all caches in the folder may take. What no process uses is removed to make room,
            oldest first; the rows that still find none are never kept. Half of the disk's free space is left.

    Raises:
        OSError: If the folder can't be written.
    """

    def __init__(self, key: str, rows: int, length: int, limit: int):
        # Not on Windows.
        import fcntl

        self._arguments = (key, rows, length, limit)
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / (key + _SUFFIX)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # Whoever uses a file holds a shared lock on it.
            fcntl.flock(self._file, fcntl.LOCK_SH)
            room = limit - _make_room(folder, path, min(limit, rows * length), limit)
            there = os.fstat(self._file).st_size // length
            self.kept = max(there, min(rows, min(room, shutil.disk_usage(folder).free // 2) // length))
            os.ftruncate(self._file, self.kept * length)
            os.utime(path)
        self._length = length
        shape = (self.kept, length)
        self._records: NDArray[np.uint8] = np.empty(shape, np.uint8)
        if self.kept:
            self._records = np.memmap(path, np.uint8, "r", shape=shape)
        self._whole = np.zeros(rows, bool)
        if self.kept < rows:
            logger.warning(
                f"The image cache keeps {self.kept:,} of {rows:,} images; the others are decoded in every epoch. "
                f"All would take {rows * length / 1e9:.1f} GB: see --image_cache_gb and the disk of {folder}."
            )

    def __reduce__(self) -> tuple:
        return RecordCache, self._arguments

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def has(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell which of some rows are here: bool (N,)."""
        here = self._whole[rows]
        if not here.all():
            unsure = rows[~here & (rows < self.kept)]
            self._whole[unsure] = self._records[unsure, -4:].any(1)
            here = self._whole[rows]
        return here

    def take(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Copy records.

        Args:
            rows (`numpy.ndarray`): int64 (N,).
            out (`numpy.ndarray`): uint8 (N, length), filled where a record is here.

        Returns:
            `numpy.ndarray`: the positions in `rows` whose records are not here.
        """
        here = self.has(rows)
        # A thread would take longer to wake than one record to copy.
        if here.all() and len(rows) > 1:
            for part in self.start_copying(rows, out):
                part.result()
        else:
            out[here] = self._records[rows[here]]
        return np.flatnonzero(~here)

    def start_copying(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> list[Future[None]]:
        """Begin to copy records that are all here.

        Args:
            rows (`numpy.ndarray`): int64 (N,).
            out (`numpy.ndarray`): uint8 (N, length), filled when all is done that is returned.

        Returns:
            `list[Future]`: to be waited for.
        """
        # In threads, which need Python's lock for none of the page faults.
        return [threads().submit(self._copy, rows[part], out[part]) for part in self._parts(len(rows))]

    def _parts(self, count: int) -> list[slice]:
        step = max(1, _PART // self._length)
        return [slice(start, start + step) for start in range(0, count, step)]

    def _copy(self, rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        # Any mode but "raise" copies straight to its place.
        np.take(self._records, rows, axis=0, out=out, mode="clip")

    def put(self, row: int, record: NDArray[np.uint8]) -> bool:
        """Keep a record if there is room.

        Args:
            row (`int`): its row.
            record (`numpy.ndarray`): uint8 (length,), the last four bytes not all zero.

        Returns:
            `bool`: whether it is kept.
        """
        if row >= self.kept:
            return False
        try:
            # Not through the mapping: a full disk is an error here and the end of the process there.
            os.pwrite(self._file, record.data, row * self._length)
            # Not where a disk is full before the end, nor where mappings don't show what is written.
            return bool(self._records[row, -4:].any())
        except OSError as error:
            logger.warning(f"The image cache cannot grow, and images are decoded in every epoch: {error}.")
            self.kept = 0
            return False

    def share(self) -> float:
        """Estimate which share of all rows is here."""
        count = len(self._whole)
        # What the file takes of the disk says so at once while it has holes, of which each look into one takes long.
        taken = os.fstat(self._file).st_blocks * 512 / (count * self._length)
        return taken if taken < 0.5 else float(self.has(np.arange(0, count, max(1, count // 100))).mean())


def _make_room(folder: Path, own: Path, needed: int, limit: int) -> int:
    """Remove what nobody uses until `needed` bytes fit below the limit; tell how many bytes others take."""
    import fcntl

    others = sorted((p for p in folder.glob(f"*{_SUFFIX}") if p != own), key=lambda p: p.stat().st_mtime)
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
