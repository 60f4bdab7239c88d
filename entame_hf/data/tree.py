"""Scan a folder for files that may be images."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO

from ..errors import InputError
from .splits import normal

METADATA_FILES = frozenset({"metadata.csv", "metadata.jsonl", "metadata.parquet"})
TABLE_SUFFIXES = frozenset({".parquet", ".arrow", ".tar"})

# Files that are text: a name, or a suffix.
_TEXT_NAMES = r"readme|licen[sc]e|copying|makefile|(md5|sha256)sums"
_TEXT_SUFFIXES = (
    r"txt|md|rst|[ct]sv|json|jsonl|ndjson|xml|html?|css|js|ya?ml|toml|ini|cfg|log|lock|py|ipynb|sh|bat|m|r|c|cpp|h"
)
_TEXT = re.compile(rf"{_TEXT_NAMES}|.*\.({_TEXT_SUFFIXES})", re.IGNORECASE)

# Text and others. These are images only if they begin as one; any other file may be one, whatever its suffix.
_OTHER = re.compile(
    rf"thumbs\.db|desktop\.ini|{_TEXT_NAMES}|.*\.({_TEXT_SUFFIXES}|"
    r"zip|gz|tgz|bz2|xz|7z|rar|pdf|docx?|xlsx?|pptx?|rtf|np[yz]|mat|pkl|pickle|pth?|h5|hdf5|onnx|safetensors|"
    r"tfrecord|record|feather|sqlite|mp[34]|avi|mov|mkv|webm|wav|exe|dll|lnk|url|sha256|md5|parquet|arrow|tar)",
    re.IGNORECASE,
)

# Folders that lie beside those of the images, if they hold nothing but text.
_BESIDE_IMAGES = frozenset({"annotations", "code", "docs", "imagesets", "info", "labels", "lists", "meta", "metadata"})

_IMAGE = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|II\*\0|MM\0\*|RIFF.{4}WEBP|.{4}ftyp(hei|hev|mif1|msf1|avif)|\xff\x0a|\0\0\0\x0cJXL ",
    re.DOTALL,
)


@dataclass
class Folder:
    """Hold what lies in a folder: folders, images, metadata files, all other files, and the count of images below.

    An unpacked zip file has its name without the suffix.
    """

    path: str
    folders: list[Folder] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    key: tuple[int, int] = (0, 0)
    count: int = 0
    name: str = ""

    @property
    def filled(self) -> list[Folder]:
        """The folders in it that hold images, at any depth."""
        return [folder for folder in self.folders if folder.count]

    @property
    def holds_folders(self) -> bool:
        """Whether most of its images lie in folders in it: a stray file says nothing."""
        return 2 * len(self.files) < self.count

    def walk(self) -> Iterator[Folder]:
        """Give this folder and all below it, each once even where links lead to it twice."""
        pending, seen = [self], set()
        while pending:
            folder = pending.pop()
            if folder.key not in seen:
                seen.add(folder.key)
                yield folder
                pending += folder.folders

    def images(self) -> list[str]:
        """Give the paths of all files below it that may be images, sorted."""
        return sorted(path for folder in self.walk() for path in folder.files)

    def tables(self) -> list[str]:
        """Give the paths of all Parquet, Arrow and tar files below it, sorted."""
        return sorted(path for folder in self.walk() for path in folder.others if suffix_of(path) in TABLE_SUFFIXES)

    def other_suffixes(self) -> Counter[str]:
        """Count the suffixes of all files below it that are neither images nor metadata."""
        return Counter(suffix_of(path) or os.path.basename(path) for inside in self.walk() for path in inside.others)


def suffix_of(path: str) -> str:
    """Give a file's suffix in lower case, with its dot."""
    return os.path.splitext(path)[1].lower()


def is_junk(name: str) -> bool:
    """Tell whether a file or folder is hidden or made by a system."""
    return name.startswith(".") or name in ("__MACOSX", "__pycache__", "@eaDir", "$RECYCLE.BIN")


def is_other(name: str) -> bool:
    """Tell whether a file's name says that it is no image."""
    return is_junk(name) or bool(_OTHER.fullmatch(name))


def is_text(name: str) -> bool:
    """Tell whether a file's name says that it is text, such as a table, an annotation or a program."""
    return bool(_TEXT.fullmatch(name))


def begins_as_image(file: IO[bytes]) -> bool:
    """Tell whether a file's first bytes are those of an image."""
    return bool(_IMAGE.match(file.read(16)))


def scan(path: str, unzip: Callable[[str], str] | None = None) -> Folder:
    """Scan a folder; `unzip` unpacks a zip file in it to a folder that takes its place.

    Links are followed, but not back to a folder above. Hidden files and folders are left out.
    """
    try:
        return _scan(path, frozenset(), unzip)
    except OSError as error:
        raise InputError(f"`data_dir`: cannot read {error.filename or path}: {error.strerror}.") from error


def _scan(path: str, above: frozenset[tuple[int, int]], unzip: Callable[[str], str] | None) -> Folder:
    status = os.stat(path)
    folder = Folder(path, key=(status.st_dev, status.st_ino), name=os.path.basename(path))
    above |= {folder.key}
    with os.scandir(path) as entries:
        found = sorted((entry for entry in entries if not is_junk(entry.name)), key=lambda e: normal(e.name))
    for entry in found:
        if entry.is_dir():
            below = os.stat(entry.path) if entry.is_symlink() else entry.stat()
            if (below.st_dev, below.st_ino) not in above:
                _add(folder, _scan(entry.path, above, unzip))
        elif unzip and suffix_of(entry.name) == ".zip":
            unpacked = _scan(unzip(entry.path), above, unzip)
            unpacked.name = entry.name[: -len(".zip")]
            folder.folders.append(unpacked)
        elif entry.name.lower() in METADATA_FILES:
            folder.metadata.append(entry.path)
        elif is_other(entry.name) and not _begins_as_image(entry):
            folder.others.append(entry.path)
        else:
            folder.files.append(entry.path)
    folder.count = len(folder.files) + sum(inside.count for inside in folder.folders)
    return folder


def _add(folder: Folder, inside: Folder) -> None:
    """Add a folder to the one that it lies in; of one that is beside the images by its name and files, the files."""
    holds_text = not (inside.folders or inside.files or inside.metadata)
    holds_text = holds_text and all(is_text(os.path.basename(path)) for path in inside.others)
    if holds_text and inside.others and inside.name.casefold() in _BESIDE_IMAGES:
        folder.others += inside.others
    else:
        folder.folders.append(inside)


def _begins_as_image(entry: os.DirEntry[str]) -> bool:
    try:
        # A pipe would be waited for.
        if not entry.is_file():
            return False
        with open(entry.path, "rb", buffering=0) as file:
            return begins_as_image(file)
    except OSError:
        return False
