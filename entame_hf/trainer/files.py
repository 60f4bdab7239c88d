"""The output folder of a training, and the metrics in it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.utils import logging

from ..errors import InputError
from ..files import write_text

logger = logging.get_logger(__name__)


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
