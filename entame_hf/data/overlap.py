"""Find files that are in two splits before training, by reading those of equal size alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from ..errors import printable
from .columns import label_indices
from .images import UnreadableImageError, encoded_bytes
from .source import count_of
from .workers import threads

# So many bytes and files are read in seconds. Of more, hashes are known once the images are cached.
_MAX_BYTES, _MAX_FILES = 10**9, 20_000

_AT_ONCE = 64


def overlap_note(split: str, rows: Dataset, train: Dataset, image_column: str, label_column: str) -> str | None:
    """Say how many images of a split are in the training split too.

    Args:
        split (`str`): what the note calls the split.
        rows, train (`datasets.Dataset`): the splits, undecoded.
        image_column, label_column (`str`): their columns.

    Returns:
        `str` or `None`: the note; `None` where no file equals another, byte by byte.
    """
    sizes, others = _sizes(rows, image_column), _sizes(train, image_column)
    own, theirs = (np.flatnonzero(np.isin(a, b) & (a > 0)) for a, b in ((sizes, others), (others, sizes)))
    files = sum(_in_files(part, image_column) * len(i) for part, i in ((rows, own), (train, theirs)))
    if sizes[own].sum() + others[theirs].sum() > _MAX_BYTES or files > _MAX_FILES:
        return f"images of {split} were not compared with those of train: too many files have the same size."
    known = {digest: row for row, digest in _digests(train, theirs, image_column)}
    pairs = [(row, known[digest]) for row, digest in _digests(rows, own, image_column) if digest in known]
    if not pairs:
        return None
    own_rows, train_rows = zip(*pairs, strict=True)
    labels = label_indices(rows.select(own_rows), label_column)
    trained = label_indices(train.select(train_rows), label_column)
    different = int((labels != trained).sum())
    label = f", {different:,} of them with another label" if different else ""
    names = " and ".join(_name(part, row, image_column) for part, row in zip((rows, train), pairs[0], strict=True))
    verb = "is" if len(pairs) == 1 else "are"
    return f"{count_of(len(pairs), 'image')} of {split} {verb} in train too{label}, such as {names}."


def _sizes(rows: Dataset, column: str) -> NDArray[np.int64]:
    """Give the bytes of each image's file: int64 (N,), 0 where there is none."""
    images = rows.data.column(column)
    lengths = pc.binary_length(pc.struct_field(images, "bytes"))
    paths = pc.if_else(pc.is_null(lengths), pc.struct_field(images, "path"), None)
    if rows._indices is not None:
        lengths, paths = (values.take(rows._indices.column(0)) for values in (lengths, paths))
    sizes = pc.fill_null(lengths, 0).to_numpy().astype(np.int64)
    where = np.flatnonzero(pc.is_valid(paths).to_numpy())
    if len(where):
        sizes = sizes.copy()
        names = paths.drop_null().to_pylist()
        parts = (names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE))
        sizes[where] = [size for part in threads().map(_file_sizes, parts) for size in part]
    return sizes


def _file_sizes(paths: list[str]) -> list[int]:
    return [_size(path) for path in paths]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _in_files(rows: Dataset, column: str) -> bool:
    return bool(len(rows)) and (rows[0][column] or {}).get("bytes") is None


def _digests(rows: Dataset, wanted: NDArray[np.int64], column: str) -> Iterator[tuple[int, int]]:
    def digests(chosen: list[int]) -> list[int | None]:
        return [_digest(image) for image in rows[chosen][column]]

    parts = [wanted[start : start + _AT_ONCE].tolist() for start in range(0, len(wanted), _AT_ONCE)]
    for chosen, found in zip(parts, threads().map(digests, parts), strict=True):
        yield from ((row, digest) for row, digest in zip(chosen, found, strict=True) if digest is not None)


def _digest(image: object) -> int | None:
    try:
        data = encoded_bytes(image)
    except UnreadableImageError:
        return None
    return None if data is None else xxh3_64_intdigest(data)


def _name(rows: Dataset, row: int, column: str) -> str:
    path = (rows[row][column] or {}).get("path")
    return printable(path) if path else f"row {row}"
