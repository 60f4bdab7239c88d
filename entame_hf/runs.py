"""Folders that hold a run: claimed before anything is written, resumed where they were left."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from .errors import InputError

# What a run leaves behind, whoever wrote it.
_FILES = ("config.json", "model.safetensors", "trainer_state.json", "all_results.json", "training_args.bin")


def claim_output_dir(args: TrainingArguments) -> None:
    """Make sure that a run may write to its output folder, and that it wipes no other run.

    Args:
        args (`TrainingArguments`): `output_dir` and `resume_from_checkpoint` are read, and `overwrite` where there is
            one: it removes the files of the run that the folder holds, and nothing else.

    Raises:
        InputError: the folder cannot be written to, or holds another run.
    """
    if not args.output_dir:
        raise InputError("No output folder. Give --output_dir, such as out/mine.")
    folder = Path(args.output_dir)
    try:
        existed = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"--output_dir {folder} cannot be written to ({error.strerror}). Give a folder of yours."
        ) from error
    if not existed or args.resume_from_checkpoint is not None or args.process_index != 0:
        return
    left = [path for path in folder.iterdir() if path.name in _FILES or path.name.startswith("checkpoint-")]
    if left and not getattr(args, "overwrite", False):
        raise InputError(
            f"--output_dir {folder} holds another run ({left[0].name}). Go on with it (--resume_from_checkpoint "
            "last), remove it (--overwrite) or give another folder."
        )
    for path in left:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def last_checkpoint(args: TrainingArguments) -> str | None:
    """Resolve `resume_from_checkpoint`: a checkpoint's folder, or "last" for the newest in the output folder.

    Args:
        args (`TrainingArguments`): `output_dir` and `resume_from_checkpoint` are read.

    Returns:
        `str` or `None`: the folder; None for a run that starts afresh.

    Raises:
        InputError: there is no such checkpoint.
    """
    asked = args.resume_from_checkpoint
    if asked is None:
        return None
    found = get_last_checkpoint(args.output_dir) if asked.lower() in ("last", "true") else asked
    if found is None or not Path(found, "trainer_state.json").is_file():
        raise InputError(
            f"--resume_from_checkpoint {asked}: no checkpoint there. Give the path of a checkpoint-... folder, or "
            f'"last" for the newest in --output_dir {args.output_dir}.'
        )
    return found
