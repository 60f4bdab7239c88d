"""Files that are written whole or not at all, and disks that are full."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.utils import logging

from ..errors import InputError, RunError

logger = logging.get_logger(__name__)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: beside its place, and renamed.

    Raises:
        RunError: the disk is full, or the folder is gone or read-only.
    """
    draft = path.with_name(f".{path.name}.draft")
    with explained_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(draft)
            draft.replace(path)
        except OSError:
            # The name may be too long for it too.
            with suppress(OSError):
                draft.unlink()
            raise


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


@contextmanager
def explained_write_errors(path: Path) -> Iterator[None]:
    """Name a file or folder, and what to do, if it cannot be written: the libraries name neither."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # In the order of the three: Python's, torch's and safetensors' ways of saying it.
        by_torch = "inline_container" in str(error)
        if not (getattr(error, "errno", None) or by_torch or "I/O error" in str(error)):
            raise
        free = shutil.disk_usage(next(place for place in path.absolute().parents if place.exists())).free / 1e6
        reason = "torch.save could not finish" if by_torch else getattr(error, "strerror", None) or error
        raise RunError(
            f"{path} could not be written ({reason}); {free:.0f} MB are free there. Make room, and type the command "
            "again. Earlier checkpoints are intact: `resume_from_checkpoint=last` (True in Python) resumes a training."
        ) from error


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
