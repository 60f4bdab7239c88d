"""Scan a folder for files that may be images, without opening one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import InputError
from .splits import normal

METADATA_FILES = frozenset({"metadata.csv", "metadata.jsonl", "metadata.parquet"})

TABLE_SUFFIXES = frozenset({".parquet", ".arrow", ".tar"})

# What is obviously no image. Any other file of a class folder is tried by its content, whatever its suffix.
_OTHER_SUFFIXES = TABLE_SUFFIXES.union(
    f".{suffix}"
    for suffix in [
        "txt",
        "md",
        "rst",
        "csv",
        "tsv",
        "json",
        "jsonl",
        "ndjson",
        "xml",
        "html",
        "htm",
        "css",
        "js",
        "yaml",
        "yml",
        "toml",
        "ini",
        "cfg",
        "log",
        "lock",
        "py",
        "ipynb",
        "sh",
        "bat",
        "m",
        "r",
        "c",
        "cpp",
        "h",
        "zip",
        "gz",
        "tgz",
        "bz2",
        "xz",
        "7z",
        "rar",
        "pdf",
        "doc",
        "docx",
        "xls",
        "xlsx",
        "ppt",
        "pptx",
        "rtf",
        "npy",
        "npz",
        "mat",
        "pkl",
        "pickle",
        "pt",
        "pth",
        "h5",
        "hdf5",
        "onnx",
        "safetensors",
        "tfrecord",
        "record",
        "feather",
        "sqlite",
        "mp4",
        "avi",
        "mov",
        "mkv",
        "webm",
        "mp3",
        "wav",
        "exe",
        "dll",
        "lnk",
        "url",
        "sha256",
        "md5",
    ]
)
_OTHER_NAMES = frozenset(
    ["thumbs.db", "desktop.ini", "readme", "license", "licence", "copying", "makefile", "md5sums", "sha256sums"]
)


@dataclass
class Folder:
    """Hold what lies in a folder.

    Attributes:
        path (`str`): its absolute path.
        folders (`list[Folder]`): the folders in it, sorted by name.
        files (`list[str]`): the paths of the files right in it that may be images, sorted.
        metadata (`list[str]`): the paths of metadata files right in it.
        others (`Counter[str]`): the suffixes of all other files right in it.
        count (`int`): how many files below it may be images.
    """

    path: str
    folders: list[Folder] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    metadata: list[str] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    key: tuple[int, int] = (0, 0)
    count: int = 0

    @property
    def name(self) -> str:
        """Its name, as it is."""
        return os.path.basename(self.path)

    @property
    def filled(self) -> list[Folder]:
        """The folders in it that hold images, at any depth."""
        return [folder for folder in self.folders if folder.count]

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


def is_junk(name: str) -> bool:
    """Tell whether a file or folder is hidden or made by a system."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir", "$RECYCLE.BIN")


def may_be_image(name: str) -> bool:
    """Tell whether a file may be an image: any that is not obviously something else."""
    return (
        not is_junk(name)
        and name.lower() not in _OTHER_NAMES
        and os.path.splitext(name)[1].lower() not in _OTHER_SUFFIXES
    )


def scan(path: str) -> Folder:
    """Scan a folder.

    Links are followed, but not back to a folder above. Hidden files and folders are left out.

    Args:
        path (`str`): the folder.

    Returns:
        [`Folder`]: What lies in it.

    Raises:
        InputError: If a folder can't be read.
    """
    try:
        return _scan(path, frozenset())
    except OSError as error:
        raise InputError(f"`data_dir`: cannot read {error.filename or path}: {error.strerror}.") from error


def _scan(path: str, above: frozenset[tuple[int, int]]) -> Folder:
    status = os.stat(path)
    folder = Folder(path, key=(status.st_dev, status.st_ino))
    above |= {folder.key}
    with os.scandir(path) as entries:
        found = sorted((entry for entry in entries if not is_junk(entry.name)), key=lambda e: normal(e.name))
    for entry in found:
        if entry.is_dir():
            below = os.stat(entry.path) if entry.is_symlink() else entry.stat()
            if (below.st_dev, below.st_ino) not in above:
                folder.folders.append(_scan(entry.path, above))
        elif entry.name.lower() in METADATA_FILES:
            folder.metadata.append(entry.path)
        elif may_be_image(entry.name):
            folder.files.append(entry.path)
        else:
            folder.others[os.path.splitext(entry.name)[1].lower() or entry.name] += 1
    folder.count = len(folder.files) + sum(inside.count for inside in folder.folders)
    return folder
