"""Name the images that are in no split, with the reason, in a file beside the results."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ..errors import printable

SKIPPED_FILE = "skipped_images.csv"


class SkippedImage(NamedTuple):
    """Name an image that is not used.

    Attributes:
        image (`str`): its path, or its row.
        split (`str`): the split it belongs to; empty if it belongs to none.
        reason (`str`): why it is not used.
    """

    image: str
    split: str
    reason: str


def write_skipped_images(folder: str | os.PathLike[str], skipped: Iterable[SkippedImage]) -> Path | None:
    """Write which images are not used, and why.

    Args:
        folder (`str` or `os.PathLike`): the folder of the results.
        skipped (iterable of [`SkippedImage`]): what [`Splits`] left out and what the datasets could not read.

    Returns:
        `pathlib.Path` or `None`: the file `skipped_images.csv`; `None`, and no file, where every image is used.
    """
    path = Path(folder) / SKIPPED_FILE
    rows = list(dict.fromkeys(skipped))
    if not rows:
        path.unlink(missing_ok=True)
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(SkippedImage._fields)
        writer.writerows([printable(value) for value in row] for row in rows)
    return path
