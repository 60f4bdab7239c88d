"""One run an output folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging

from ..errors import InputError
from .files import check_writable

logger = logging.get_logger(__name__)

LOCK_FILE = ".run.lock"
# The folders that this process holds: a run that holds its folder may start a training there.
_held: set[Path] = set()


@contextmanager
def locked_output_dir(folder: str | Path, is_writer: bool = True) -> Iterator[None]:
    """Hold an output folder for this process while this context lasts; if the process dies, the system lets go of it.

    Args:
        folder (`str` or `Path`): the run's output folder; it is made if it is missing.
        is_writer (`bool`, *optional*, defaults to `True`): whether this process writes there; others hold nothing.

    Raises:
        InputError: another process holds the folder; the message names its id and its host.
    """
    place = Path(folder).absolute()
    if not is_writer or place in _held:
        yield
        return
    check_writable(place)
    place.mkdir(parents=True, exist_ok=True)
    with (place / LOCK_FILE).open("a+") as file:
        try:
            # Not on Windows.
            import fcntl

            # The lock of a process and not of an open file: a worker that is forked does not hold it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise InputError(
                f"`output_dir={folder}` is in use by {_holder(place)}. Wait for it to end, or give another "
                "`output_dir`."
            ) from error
        except (ImportError, OSError) as error:
            logger.warning(f"{place} cannot be locked ({error}): start no second run there.")
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        _held.add(place)
        try:
            yield
        finally:
            _held.discard(place)
            file.truncate(0)


def _holder(place: Path) -> str:
    try:
        holder = json.loads((place / LOCK_FILE).read_text())
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
