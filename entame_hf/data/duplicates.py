"""Find images that are in two splits, or in two classes: by their files, later by the hashes that the cache keeps."""

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
# The hashes of a split's images, their labels, and what names an image by its row.
Part = tuple[Hashes, NDArray[np.int64], Callable[[int], str]]


class Duplicates(NamedTuple):
    """Count the images of one split whose files equal files of train, those of another label, and name the first.

    Of train itself, those of another label alone.
    """

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
        if split == "train":
            return f"{count_of(self.images, 'image')} of train {verb} there with another label too, such as {names}."
        return f"{count_of(self.images, 'image')} of {split} {verb} in train too{label}, such as {names}."


def compare_files(rows: Dataset, train: Dataset, image_column: str, label_column: str) -> Duplicates | None:
    """Find the images of a split that are in train too, by reading files of one size; `None` if they are too many.

    Of train itself, find those that are there with another label.
    """
    parts = [rows] if rows is train else [rows, train]
    sizes = [_sizes(part, image_column) for part in parts]
    wanted = [np.flatnonzero(np.isin(own, _shared(sizes)) & (own > 0)) for own in sizes]
    in_files = [len(w) for part, w in zip(parts, wanted, strict=True) if image_files(part, image_column)[0].null_count]
    read = sum(int(own[w].sum()) for own, w in zip(sizes, wanted, strict=True))
    if read > _MAX_BYTES or sum(in_files) > _MAX_FILES:
        return None
    found = [
        (_hashes(part, w, image_column), label_indices(part, label_column), partial(_name, part, image_column))
        for part, w in zip(parts, wanted, strict=True)
    ]
    return _match(found[0], found[-1])


def find_duplicates(split: ClassificationDataset, other: ClassificationDataset) -> Duplicates:
    """Find the images of a split that are in another too, of those that are cached in both."""
    parts = [(part.content_hashes(), part.labels.numpy(), part.describe) for part in dict.fromkeys((split, other))]
    return _match(parts[0], parts[-1])


def _shared(sizes: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Give the sizes that are in two splits, or that two files of one split have."""
    if len(sizes) == 1:
        values, counts = np.unique(sizes[0], return_counts=True)
        return values[counts > 1]
    first, second = sizes
    return first[np.isin(first, second)]


def _match(part: Part, other: Part) -> Duplicates:
    (own, labels, name), (others, other_labels, other_name) = part, other
    order = np.lexsort((other_labels, others))
    found = order[np.searchsorted(others, own, sorter=order).clip(max=len(others) - 1)]
    differ = labels != other_labels[found]
    rows = np.flatnonzero((own != 0) & (others[found] == own) & (differ | (own is not others)))
    matches = found[rows]
    example = (name(int(rows[0])), other_name(int(matches[0]))) if len(rows) else None
    return Duplicates(len(rows), int(differ[rows].sum()), example)


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
