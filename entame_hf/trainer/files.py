"""The output folder of a training: one run at a time in it, and the metrics."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainingArguments
from transformers.utils import logging

from ..errors import InputError
from ..files import explained_write_errors, write_text

logger = logging.get_logger(__name__)

LOCK_FILE = ".run.lock"
# The folders that this process holds: a run that holds its folder may start a training there.
_held: set[Path] = set()


def check_writable(folder: Path) -> None:
    """Make sure that files can be written to a folder, which is not made yet if it is missing.

    Raises:
        InputError: it is a file, a link that leads nowhere, too long a name, or not this user's.
    """
    # Input that is refused later leaves no trace.
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            raise NotADirectoryError(0, "it is a file, or a link that leads nowhere")
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=parent):
            pass
    # A name may hold a null byte.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", error)
        raise InputError(f"`output_dir={folder}` cannot be written to ({reason}). Give a folder of yours.") from error


def make_output_dir(args: TrainingArguments) -> None:
    """Make the output folder as Trainer does, but explain in one line why it cannot be made."""
    folder = Path(str(args.output_dir))
    if args.should_save and not os.path.isdir(folder):
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
    """Write the metrics of a split to `{split}_results.json`, and add them to `all_results.json`."""
    files = {f"{split}_results.json": metrics}
    if combined:
        files["all_results.json"] = {**_known_results(folder / "all_results.json"), **metrics}
    for name, values in files.items():
        write_text(folder / name, json.dumps(values, indent=4, sort_keys=True))


def _known_results(file: Path) -> dict[str, Any]:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict):
        logger.warning(f"{file} is damaged: it is written anew.")
        return {}
    return known


@contextmanager
def locked_output_dir(folder: str | Path, is_writer: bool = True) -> Iterator[None]:
    """Hold an output folder for this process while this context lasts; if the process dies, the system lets go of it.

    Input that is refused within leaves the folder as it was; one that was made for it is removed. A process that is no
    writer holds nothing.

    Raises:
        InputError: another process holds the folder; the message names its id and its host.
    """
    if is_writer:
        check_writable(Path(folder))
    # Of links to it too: a process that closes the lock's file a second time would lose the lock.
    place = Path(os.path.realpath(folder))
    if not is_writer or place in _held:
        yield
        return
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
