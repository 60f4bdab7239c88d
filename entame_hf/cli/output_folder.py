"""Folders that hold a run: claimed before anything is written, resumed where they were left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..errors import InputError
from ..trainer import check_checkpoint, last_whole_checkpoint, same_on_all

# What a run leaves behind, whoever wrote it.
_FILES = (
    "all_results.json",
    "config.json",
    "entame_head.safetensors",
    "eval_results.json",
    "model.safetensors",
    "preprocessor_config.json",
    "train_results.json",
    "trainer_state.json",
    "training_args.bin",
)


def check_output_dir(args: TrainingArguments, inputs: Sequence[str | None]) -> None:
    """Make sure that a run may write to its output folder, and that it wipes no other run and nothing it reads.

    Args:
        args (`TrainingArguments`):
            `output_dir` and `resume_from_checkpoint` are read, and `overwrite` where there is one.
        inputs (sequence of `str`): the model and data that the run reads; those that are no folders do not matter.

    Raises:
        InputError: the folder cannot be written to, holds another run, or `overwrite` would remove an input.
    """
    folder = Path(str(args.output_dir))
    # Nothing is made here: input that is refused later leaves no trace.
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise InputError(
            f"--output_dir {folder} cannot be written to ({error.strerror}). Give a folder of yours."
        ) from error
    if args.resume_from_checkpoint is not None:
        return
    left = _left_behind(folder)
    if left and not getattr(args, "overwrite", False):
        raise InputError(
            f"--output_dir {folder} holds another run ({left[0].name}). Go on with it (--resume_from_checkpoint "
            "last), remove it (--overwrite) or give another folder."
        )
    for name in inputs:
        if left and name and Path(name).exists() and Path(name).resolve().is_relative_to(folder.resolve()):
            raise InputError(f"--overwrite would remove {name}, which this run reads. Give another --output_dir.")


def clear_output_dir(args: TrainingArguments) -> None:
    """Remove the files of the run that the output folder holds, and nothing else, just before a new one begins.

    Args:
        args (`TrainingArguments`): they have passed [`check_output_dir`].
    """
    if args.resume_from_checkpoint is None and args.process_index == 0:
        for path in _left_behind(Path(str(args.output_dir))):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _left_behind(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [
        path for path in folder.iterdir() if path.name in _FILES or path.name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
    ]


def last_checkpoint(args: TrainingArguments) -> str | None:
    """Resolve `resume_from_checkpoint`: a checkpoint's folder, or "last" for the newest whole one.

    Args:
        args (`TrainingArguments`): `output_dir` and `resume_from_checkpoint` are read.

    Returns:
        `str` or `None`: the folder; None for a run that starts afresh.

    Raises:
        InputError: on every process: one of them has no such checkpoint, or it is not whole.
    """
    asked = args.resume_from_checkpoint
    if asked is None:
        return None
    folder = str(args.output_dir)

    def find() -> str:
        found = last_whole_checkpoint(folder) if asked.lower() in ("last", "true") else asked
        return check_checkpoint(found, f"--resume_from_checkpoint {asked}", folder)

    return same_on_all(find)
