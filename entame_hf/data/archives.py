"""Unpack a zip file of image folders, once."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import InputError
from .cache import cache_folder
from .tree import TABLE_SUFFIXES, begins_as_image, is_junk, is_other, is_text, suffix_of

# Photos hardly shrink in a zip file, drawings to a twentieth. What unpacks to more is refused unless it is small.
_RATIO, _SMALL, _LIMIT = 100, 10**8, 10**11

# Of these, two that differ are no accident.
_TABLES = (*TABLE_SUFFIXES, ".csv", ".tsv", ".json", ".jsonl")

# The handles of folders that this process uses: whoever uses a folder holds a shared lock on it.
_used: dict[Path, int] = {}


def unpack(path: str, max_unzipped_gb: float | None = None) -> str:
    """Unpack a zip file once, beside the image cache; return the folder.

    A new version replaces those that no process uses any more, and what killed processes left. The last version
    stays when the zip file is removed. By default, it may unpack to 100 times its size where that is more than 0.1
    GB, and to 100 GB.

    Raises:
        InputError: If it can't be unpacked, unpacks to more than `max_unzipped_gb`, or there is no room for it.
    """
    status, folder = os.stat(path), cache_folder()
    name = f"zip-{_digest(os.path.realpath(path))}-"
    target = folder / (name + _digest(f"{status.st_size} {status.st_mtime_ns}"))
    folder.mkdir(parents=True, exist_ok=True)
    # Alone, so that what others find or make is locked before anybody could remove it.
    with _locked(folder):
        if target.is_dir():
            _use(target)
            return str(target)
        for old in (*folder.glob(f"{name}*"), *folder.glob("tmp*")):
            with _locked(old, wait=False) as unused:
                if unused:
                    shutil.rmtree(old, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder))
        _use(unfinished)
    try:
        _extract(path, str(unfinished), max_unzipped_gb)
        os.rename(unfinished, target)
    # A password, a method that is not known, a checksum that is off.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, zlib.error) as error:
        # Unless another process was first.
        if not target.is_dir():
            raise InputError(f"`data_dir={path}` cannot be unpacked: {error}. Unpack it yourself.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        _use(target)
        _leave(unfinished)
    return str(target)


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


def _extract(path: str, folder: str, max_unzipped_gb: float | None) -> None:
    with zipfile.ZipFile(path) as archive:
        members = _choose_members(archive)
        needed, free = sum(member.file_size for member in members), shutil.disk_usage(folder).free
        _check_size(path, needed, max_unzipped_gb)
        if needed > free:
            raise OSError(f"it holds {needed / 1e9:.1f} GB and {folder} has room for {free / 1e9:.1f} GB")
        archive.extractall(folder, members)


def _choose_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Choose the files that a folder is read by, each by the name that it gets.

    Raises:
        zipfile.BadZipFile: two files of one name differ: one would replace the other.
    """
    chosen: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        # As zipfile unpacks them.
        name = _read_name(member)
        parts = [part for part in name.split("/") if part not in ("", ".", "..")]
        if name.endswith("/") or not parts or any(map(is_junk, parts)) or not _is_read(archive, member, parts[-1]):
            continue
        member.filename = "/".join(parts)
        known = chosen.setdefault(member.filename, member)
        is_table = suffix_of(parts[-1]) in _TABLES
        if (known.CRC, known.file_size) != (member.CRC, member.file_size) and (is_table or not is_text(parts[-1])):
            raise zipfile.BadZipFile(f"it holds two different files {member.filename}")
    return [*chosen.values()]


def _is_read(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> bool:
    """Tell whether a folder is read by a file of this name: images, tables, text, and zip files of splits."""
    if not is_other(name) or is_text(name) or suffix_of(name) in (*TABLE_SUFFIXES, ".zip"):
        return True
    with archive.open(member) as file:
        return begins_as_image(file)


def _read_name(member: zipfile.ZipInfo) -> str:
    """Read a name as UTF-8 where it can be: macOS writes it so and does not say so, and zipfile takes it for CP437.

    Old tools of Windows separate folders by backslashes.
    """
    name = member.filename
    if not member.flag_bits & 0x800:
        with suppress(UnicodeError):
            name = name.encode("cp437").decode()
    return name.replace("\\", "/")


def _check_size(path: str, needed: int, max_unzipped_gb: float | None) -> None:
    # Sizes of a directory are kept: reading a member ends at its own.
    limit = max_unzipped_gb * 1e9 if max_unzipped_gb else min(_LIMIT, max(_SMALL, _RATIO * os.path.getsize(path)))
    if needed > limit:
        raise InputError(
            f"`data_dir={path}` has {os.path.getsize(path) / 1e6:,.1f} MB and unpacks to {needed / 1e9:,.1f} GB; "
            f"up to {limit / 1e9:,.1f} GB are unpacked. If you trust it, give "
            f"`max_unzipped_gb={math.ceil(needed / 1e9)}`."
        )
