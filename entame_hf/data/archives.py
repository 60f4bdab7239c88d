"""Unpack a zip file of image folders, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import InputError
from .cache import cache_folder

# The handles of folders that this process uses: whoever uses a folder holds a shared lock on it.
_used: dict[Path, int] = {}


def unpack(path: str, suffixes: frozenset[str]) -> str:
    """Unpack what has one of some suffixes, beside the image cache, unless that was done before.

    A new version of a zip file replaces those that no process uses any more, and what processes left that were killed
    on the way. The last version stays when the zip file is removed or renamed.

    Args:
        path (`str`): a zip file.
        suffixes (`frozenset[str]`): in lower case, with their dot.

    Returns:
        `str`: the folder that the zip file holds; a folder that all the others lie in is left out.

    Raises:
        InputError: If the file can't be unpacked, or there is no room for what it holds.
    """
    status, folder = os.stat(path), cache_folder()
    name = f"zip-{_digest(os.path.realpath(path))}-"
    target = folder / (name + _digest(f"{status.st_size} {status.st_mtime_ns}"))
    folder.mkdir(parents=True, exist_ok=True)
    # Alone, so that what others find or make is locked before anybody could remove it.
    with _locked(folder):
        if target.is_dir():
            _use(target)
            return str(_without_wrapping(target))
        for old in (*folder.glob(f"{name}*"), *folder.glob("tmp*")):
            with _locked(old, wait=False) as unused:
                if unused:
                    shutil.rmtree(old, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder))
        _use(unfinished)
    try:
        _extract(path, suffixes, str(unfinished))
        os.rename(unfinished, target)
    # A password, a method that is not known, a checksum that is off.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
        # Unless another process was first.
        if not target.is_dir():
            raise InputError(f"--data_dir {path} cannot be unpacked: {error}. Unpack it yourself.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        _use(target)
        _leave(unfinished)
    return str(_without_wrapping(target))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _use(folder: Path) -> None:
    handle = _lock(folder, shared=True)
    if handle is not None:
        _leave(folder)
        _used[folder] = handle


def _leave(folder: Path) -> None:
    if folder in _used:
        os.close(_used.pop(folder))


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[bool]:
    handle = _lock(folder, wait=wait)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _lock(folder: Path, shared: bool = False, wait: bool = True) -> int | None:
    """Lock a folder until its handle is closed; `None` if it is in use, gone, or on a system without such locks."""
    try:
        # Not on Windows.
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


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
