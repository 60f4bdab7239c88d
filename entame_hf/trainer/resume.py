"""Going on after a run was cut off: a checkpoint counts when it is whole."""

from __future__ import annotations

import errno
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..errors import InputError, RunError

logger = logging.get_logger(__name__)

# No space, no quota, or a file that is too large.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# A file in a checkpoint while it is written: ranks end at different times, and Trainer's state says nothing of them.
INCOMPLETE = ".incomplete"

# As Trainer, peft, FSDP and DeepSpeed name what holds them.
_WEIGHTS = ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp*", "global_step*")


def damage(checkpoint: str | Path) -> str | None:
    """Tell why a checkpoint cannot be resumed from; reads no tensor.

    Args:
        checkpoint (`str` or `Path`): the checkpoint's folder.

    Returns:
        `str` or `None`: what is missing or cut off; None for a whole checkpoint.
    """
    folder = Path(checkpoint)
    if not (folder / TRAINER_STATE_NAME).is_file():
        return f"it has no {TRAINER_STATE_NAME}"
    if _is_unfinished(folder):
        return "its writing never ended"
    if not any(file.match(pattern) for file in folder.iterdir() for pattern in _WEIGHTS):
        return "it has no weights"
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors" and not _is_safetensors(file):
            return f"{file.name} is cut off"
        if file.suffix in (".pt", ".pth") and not zipfile.is_zipfile(file):
            return f"{file.name} is cut off"
    return None


def last_whole_checkpoint(folder: str | Path) -> str | None:
    """Find the newest checkpoint of a run that is whole, and name the ones after it.

    Args:
        folder (`str` or `Path`): the run's output folder.

    Returns:
        `str` or `None`: the checkpoint's folder; None where there is none.
    """
    for checkpoint in reversed(_checkpoints(folder)):
        reason = damage(checkpoint)
        if reason is None:
            return str(checkpoint)
        logger.warning(f"Skipping {checkpoint}, which is not whole: {reason}.")
    return None


def check_checkpoint(checkpoint: str | None, asked: str, folder: str | Path) -> str:
    """Make sure that a checkpoint can be resumed from.

    Args:
        checkpoint (`str`, *optional*): its folder.
        asked (`str`): what the user typed, for the message.
        folder (`str` or `Path`): the run's output folder, for the message.

    Returns:
        `str`: the checkpoint.

    Raises:
        InputError: it is not there, or not whole.
    """
    missing = checkpoint is None or not Path(checkpoint).is_dir()
    reason = "there is no checkpoint there" if missing else damage(str(checkpoint))
    if checkpoint is None or reason is not None:
        raise InputError(
            f"{asked}: {reason}. Give the path of a checkpoint-... folder that is whole, or "
            f'"last" (True in Python) for the newest of them in the output folder {folder}.'
        )
    return checkpoint


def find_checkpoint(asked: str | Literal[True], args: TrainingArguments) -> str:
    """Find the checkpoint that a run resumes from, and remove the incomplete ones of its output folder.

    Args:
        asked (`str` or `True`): a checkpoint's folder, or `True` for the newest intact one in `args.output_dir`.
        args (`TrainingArguments`): the run's.

    Returns:
        `str`: the checkpoint's folder.

    Raises:
        InputError: there is none, or it is incomplete.
    """
    folder = str(args.output_dir)
    with args.main_process_first(desc="looking for the last intact checkpoint"):
        found = last_whole_checkpoint(folder) if asked is True else asked
        found = check_checkpoint(found, f"resume_from_checkpoint={asked}", folder)
        _remove_unfinished(folder)
    return found


class BestCheckpointFinder(TrainerCallback):
    """Find the best checkpoint of a resumed run where its folder was moved, or came from the Hub."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.best_model_checkpoint is None and state.best_global_step:
            best = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best.is_dir():
                state.best_model_checkpoint = str(best)
            else:
                logger.warning(f"The best checkpoint so far, {best.name}, is gone: only a better one can replace it.")


def forget_place(checkpoint: str | Path) -> None:
    """Take the path of the best checkpoint, which is nobody else's business, out of a checkpoint's state.

    The step that it belongs to stays, and finds it when the run is resumed.

    Args:
        checkpoint (`str` or `Path`): the checkpoint's folder.
    """
    file = Path(checkpoint, TRAINER_STATE_NAME)
    state = json.loads(file.read_text(encoding="utf-8"))
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({**state, "best_model_checkpoint": None}, indent=2) + "\n", encoding="utf-8")
    draft.replace(file)


@contextmanager
def unfinished(folder: Path, is_writer: bool) -> Iterator[None]:
    """Mark a checkpoint as incomplete until this context ends; remove the checkpoint if its writing fails."""
    mark = folder / INCOMPLETE
    try:
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        yield
        if is_writer:
            mark.unlink(missing_ok=True)
    except BaseException:
        if is_writer and _is_unfinished(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def explained_full_disk(folder: Path) -> Iterator[None]:
    """Name the disk and the way on if it is full: the libraries name neither."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # In the order of the three: Python's, torch's and safetensors' ways of saying it.
        by_torch = "inline_container" in str(error)
        if not (getattr(error, "errno", None) in FULL or by_torch or "I/O error" in str(error)):
            raise
        free = shutil.disk_usage(next(path for path in folder.absolute().parents if path.exists())).free / 1e6
        reason = "torch.save came to no end" if by_torch else str(error).rstrip(".")
        raise RunError(
            f"{folder} could not be written: {reason}. {free:.0f} MB are free there. Earlier checkpoints are as they "
            "were: make room, and go on with --resume_from_checkpoint last (resume_from_checkpoint=True in Python)."
        ) from error


def _checkpoints(folder: str | Path) -> list[Path]:
    found = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = [path for path in found if path.is_dir() and re.search(r"-\d+$", path.name)]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]))


def _remove_unfinished(folder: str | Path) -> None:
    """Remove what would count among the checkpoints that `save_total_limit` allows."""
    for checkpoint in _checkpoints(folder):
        if _is_unfinished(checkpoint):
            logger.warning(f"Removing {checkpoint}, whose writing never ended.")
            shutil.rmtree(checkpoint, ignore_errors=True)


def _is_unfinished(checkpoint: Path) -> bool:
    """Tell whether a checkpoint's writing began and did not end."""
    if (checkpoint / INCOMPLETE).exists():
        return True
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return False


def _is_safetensors(file: Path) -> bool:
    try:
        # The header says how long the file is.
        with safe_open(str(file), framework="pt"):
            return True
    except SafetensorError:
        return False
