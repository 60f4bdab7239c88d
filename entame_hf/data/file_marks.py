"""Notice when the files of a dataset's images change."""

from __future__ import annotations

import os

import pyarrow.compute as pc
from datasets import Dataset

from .columns import image_files
from .workers import threads


def file_marks(dataset: Dataset, image_column: str) -> list[str]:
    """Tell the state of images that lie in files of their own, which may change under the same name.

    Args:
        dataset (`datasets.Dataset`): the rows.
        image_column (`str`): the column of undecoded images.

    Returns:
        `list[str]`: equal as long as no file changes; empty where the images are in the dataset.
    """
    lengths, files = image_files(dataset, image_column)
    paths = files.filter(pc.is_null(lengths)).drop_null().to_pylist()
    # Many at once: what lies on a network is waited for side by side.
    return list(threads().map(_file_mark, (paths[i : i + 256] for i in range(0, len(paths), 256))))


def _file_mark(paths: list[str]) -> str:
    return "\n".join(_state(path) for path in paths)


def _state(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return f"{path} missing"
    # Another file may come with the same size and time of modification.
    return f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
