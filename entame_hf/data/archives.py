"""Unpack a zip file of image folders, once."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from ..errors import InputError
from .cache import cache_folder


def unpack(path: str, suffixes: frozenset[str]) -> str:
    """Unpack what has one of some suffixes, beside the image cache, unless that was done before.

    Args:
        path (`str`): a zip file.
        suffixes (`frozenset[str]`): in lower case, with their dot.

    Returns:
        `str`: the folder that the zip file holds; a folder that all the others lie in is left out.

    Raises:
        InputError: If the file can't be unpacked, or there is no room for what it holds.
    """
    status = os.stat(path)
    mark = f"{os.path.realpath(path)} {status.st_size} {status.st_mtime_ns}"
    target = cache_folder() / f"zip-{hashlib.sha256(mark.encode()).hexdigest()[:32]}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
            try:
                _extract(path, suffixes, unfinished)
            # A password, a method that is not known, a checksum that is off.
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
                raise InputError(f"--data_dir {path} cannot be unpacked: {error}. Unpack it yourself.") from error
            try:
                os.rename(unfinished, target)
            # Another process was first.
            except OSError:
                if not target.is_dir():
                    raise
            else:
                # The clean-up expects it.
                os.mkdir(unfinished)
    return str(_without_wrapping(target))


def _extract(path: str, suffixes: frozenset[str], folder: str) -> None:
    with zipfile.ZipFile(path) as archive:
        images = [member for member in archive.infolist() if os.path.splitext(member.filename)[1].lower() in suffixes]
        needed, free = sum(member.file_size for member in images), shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(f"it holds {needed / 1e9:.1f} GB and {folder} has room for {free / 1e9:.1f} GB")
        archive.extractall(folder, images)


def _without_wrapping(folder: Path) -> Path:
    inside = [e for e in folder.iterdir() if e.is_dir() and e.name != "__MACOSX" and not e.name.startswith(".")]
    wraps = len(inside) == 1 and any(entry.is_dir() for entry in inside[0].iterdir())
    return _without_wrapping(inside[0]) if wraps else folder
