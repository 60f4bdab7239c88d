"""Find images that are in two splits: before training by their files, later by the hashes that the cache keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from ..errors import printable
from .columns import image_files, image_names, label_indices
from .dataset import ClassificationDataset
from .images import UnreadableImageError, encoded_bytes
from .source import count_of
from .workers import threads

# So many bytes and files are read in seconds. Of more, hashes are known once the images are cached.
_MAX_BYTES, _MAX_FILES = 10**9, 20_000
_AT_ONCE = 64
Hashes = NDArray[np.uint64]


class Duplicates(NamedTuple):
    """Count the images of one split whose files equal files of another, those of another label, and name the first."""

    images: int
    other_labels: int
    example: tuple[str, str] | None

    def note(self, split: str) -> str | None:
        """Say how many images of a split are in train too; `None` if there is none."""
        if self.example is None:
            return None
        label = f", {self.other_labels:,} of them with another label" if self.other_labels else ""
        names = " and ".join(map(printable, self.example))
        verb = "is" if self.images == 1 else "are"
        return f"{count_of(self.images, 'image')} of {split} {verb} in train too{label}, such as {names}."


def compare_files(rows: Dataset, train: Dataset, image_column: str, label_column: str) -> Duplicates | None:
    """Find the images of a split that are in train too, by reading files of one size; `None` if they are too many."""
    sizes, others = _sizes(rows, image_column), _sizes(train, image_column)
    own, theirs = (np.flatnonzero(np.isin(a, b) & (a > 0)) for a, b in ((sizes, others), (others, sizes)))
    pairs = ((rows, own), (train, theirs))
    files = sum(len(wanted) for part, wanted in pairs if image_files(part, image_column)[0].null_count)
    if sizes[own].sum() + others[theirs].sum() > _MAX_BYTES or files > _MAX_FILES:
        return None
    hashes = (_hashes(rows, own, image_column), _hashes(train, theirs, image_column))
    labels = (label_indices(rows, label_column), label_indices(train, label_column))
    return _match(*hashes, *labels, partial(_name, rows, image_column), partial(_name, train, image_column))


def find_duplicates(split: ClassificationDataset, other: ClassificationDataset) -> Duplicates:
    """Find the images of a split that are in another too, of those that are cached in both."""
    hashes, labels = (split.content_hashes(), other.content_hashes()), (split.labels.numpy(), other.labels.numpy())
    return _match(*hashes, *labels, split.describe, other.describe)


def _match(
    own: Hashes,
    others: Hashes,
    labels: NDArray[np.int64],
    other_labels: NDArray[np.int64],
    name: Callable[[int], str],
    other_name: Callable[[int], str],
) -> Duplicates:
    order = np.argsort(others)
    found = order[np.searchsorted(others, own, sorter=order).clip(max=len(others) - 1)]
    rows = np.flatnonzero((own != 0) & (others[found] == own))
    matches = found[rows]
    example = (name(int(rows[0])), other_name(int(matches[0]))) if len(rows) else None
    return Duplicates(len(rows), int((labels[rows] != other_labels[matches]).sum()), example)


def _name(rows: Dataset, column: str, row: int) -> str:
    return image_names(rows, column, np.array([row]))[0]


def _sizes(rows: Dataset, column: str) -> NDArray[np.int64]:
    """Give the bytes of each image's file: int64 (N,), 0 where there is none."""
    lengths, paths = image_files(rows, column)
    sizes = pc.fill_null(lengths, 0).to_numpy().astype(np.int64)
    where = np.flatnonzero(pc.and_(pc.is_null(lengths), pc.is_valid(paths)).to_numpy())
    names = paths.take(where).to_pylist()
    parts = (names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE))
    sizes[where] = [size for part in threads().map(lambda part: [*map(_size, part)], parts) for size in part]
    return sizes


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _hashes(rows: Dataset, wanted: NDArray[np.int64], column: str) -> Hashes:
    """Hash the wanted images' files: uint64 (N,), 0 for the others."""

    def hash_all(chosen: list[int]) -> list[int]:
        return [_hash(image) for image in rows[chosen][column]]

    parts = [wanted[start : start + _AT_ONCE].tolist() for start in range(0, len(wanted), _AT_ONCE)]
    hashes = np.zeros(len(rows), np.uint64)
    hashes[wanted] = [found for part in threads().map(hash_all, parts) for found in part]
    return hashes


def _hash(image: object) -> int:
    try:
        data = encoded_bytes(image)
    except UnreadableImageError:
        return 0
    return 0 if data is None else xxh3_64_intdigest(data)
