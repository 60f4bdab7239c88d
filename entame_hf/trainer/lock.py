"""One run an output folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from transformers.utils import logging

from ..errors import InputError
from ..files import explained_write_errors
from .files import check_writable

logger = logging.get_logger(__name__)

LOCK_FILE = ".run.lock"
# The folders that this process holds: a run that holds its folder may start a training there.
_held: set[Path] = set()


@contextmanager
def locked_output_dir(folder: str | Path, is_writer: bool = True) -> Iterator[None]:
    """Hold an output folder for this process while this context lasts; if the process dies, the system lets go of it.

    Input that is refused within leaves the folder as it was; one that was made for it is removed. A process that is no
    writer holds nothing.

    Raises:
        InputError: another process holds the folder; the message names its id and its host.
    """
    place = Path(folder).absolute()
    if not is_writer or place in _held:
        yield
        return
    check_writable(place)
    lock, made = place / LOCK_FILE, [path for path in (place, *place.parents) if not path.exists()]
    with explained_write_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        is_new = not lock.exists()
        file = lock.open("a+")
    with file:
        _lock(file, folder, place)
        file.seek(0)
        before, left = file.read(), ""
        with explained_write_errors(place):
            _replace(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        _held.add(place)
        try:
            yield
        except InputError:
            left = before
            if is_new:
                lock.unlink(missing_ok=True)
                for path in made:
                    with suppress(OSError):
                        path.rmdir()
            raise
        finally:
            _held.discard(place)
            _replace(file, left)


def _replace(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _lock(file: TextIO, folder: str | Path, place: Path) -> None:
    try:
        # Not on Windows.
        import fcntl

        # The lock of a process and not of an open file: a worker that is forked does not hold it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise InputError(
            f"`output_dir={folder}` is in use by {_holder(place)}. Wait for it to end, or give another `output_dir`."
        ) from error
    except (ImportError, OSError) as error:
        logger.warning(f"{place} cannot be locked ({error}): start no second run there.")


def _holder(place: Path) -> str:
    try:
        holder = json.loads((place / LOCK_FILE).read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
