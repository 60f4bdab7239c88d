"""The folder of a run: checked before anything is done, claimed by the first optimizer step, written whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..errors import InputError
from ..files import explained_write_errors, write_text
from ..trainer import asks_for_last, check_writable, find_checkpoint, list_checkpoints, same_on_all, used_options
from .options import OptionParser

logger = logging.get_logger(__name__)

RUN_FILE = "run.yaml"

# Of a training batch; until the first step was taken, an older picture keeps the name.
BATCH_FILE, NEW_BATCH_FILE = "batch.png", "batch.new.png"

# What a run leaves behind, whoever wrote it.
_FILES = (
    "all_results.json",
    "config.json",
    "entame_head.safetensors",
    "eval_results.json",
    "model.safetensors",
    "preprocessor_config.json",
    RUN_FILE,
    "test_results.json",
    "train_results.json",
    TRAINER_STATE_NAME,
    "training_args.bin",
)

# Options of one start, not of the run; and a secret.
_NOT_KEPT = ("hub_token", "inspect", "overwrite", "resume_from_checkpoint")

_PATHS = ("data_dir", "dataset_name", "model_name_or_path", "output_dir")


def given_for_run(parser: OptionParser, argv: list[str]) -> dict[str, Any]:
    """Find the values that a command line sets; the `run.yaml` of a run that was moved means the folder it lies in."""
    given = parser.given(argv)
    file = Path(argv[0]) if argv else Path()
    here, before = file.parent, given.get("output_dir")
    is_run = file.name == RUN_FILE and any(path.name != RUN_FILE for path in _left_behind(here))
    if is_run and before and Path(before).resolve() != here.resolve() and "output_dir" not in parser.given(argv[1:]):
        given["output_dir"] = str(here)
        if os.environ.get("RANK", "0") == "0":
            logger.warning(f"{file} was moved from {before}: the run writes to {here}. Give `output_dir` for another.")
    return given


def check_output_dir(args: TrainingArguments, model: str | None = None, *data: str | None) -> None:
    """Make sure that a run may write to its output folder, and that it replaces no other run and nothing it reads."""
    folder = Path(str(args.output_dir))
    check_writable(folder)
    if _resumes_here(args):
        return
    left = _left_behind(folder)
    if left and not getattr(args, "overwrite", False):
        raise InputError(
            f"`output_dir={folder}` holds another run ({left[0].name}). Resume it (`resume_from_checkpoint=last`), "
            "replace it (`overwrite`) or give another folder."
        )
    for name in data:
        if name and Path(name).is_dir() and folder.resolve().is_relative_to(Path(name).resolve()):
            raise InputError(
                f"`output_dir={folder}` lies in {name}, whose images this run reads: a later run would take the "
                "pictures of this one for images. Give a folder outside it."
            )
    for name in (model, *data):
        if left and name and Path(name).exists() and Path(name).resolve().is_relative_to(folder.resolve()):
            raise InputError(f"`overwrite` would remove {name}, which this run reads. Give another `output_dir`.")


def _resumes_here(args: TrainingArguments) -> bool:
    """Tell whether a run resumes from a checkpoint of its output folder."""
    asked = args.resume_from_checkpoint
    if asked is None or asks_for_last(asked):
        return asked is not None
    return Path(asked).resolve().is_relative_to(Path(str(args.output_dir)).resolve())


def _left_behind(folder: Path) -> list[Path]:
    """List what a run left in a folder, of which all is replaced; other files are the user's."""
    if not folder.is_dir():
        return []
    return [*(path for path in folder.iterdir() if path.name in _FILES), *list_checkpoints(folder)]


class ClaimFolder(TrainerCallback):
    """Replace the run that a folder holds once the first optimizer step was taken, and note the options there.

    Until then every file stays as it was, so that a run which is refused or fails to start costs nothing: the picture
    of a training batch, which is there from the start, stands beside an older one, and goes if no step is taken.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self._is_claimed = False
        self._picture: Path | None = None

    @contextmanager
    def batch_shown(self, draw: Callable[[Path], bool]) -> Iterator[Path | None]:
        """Draw a training batch, and yield the file; `None` if there is nothing to draw."""
        file = self.folder / BATCH_FILE
        file = file.with_name(NEW_BATCH_FILE) if file.exists() else file
        try:
            self._picture = file if draw(file) else None
            yield self._picture
        finally:
            if self._picture is not None and not self._is_claimed:
                self._picture.unlink(missing_ok=True)

    # The first is called before a checkpoint of that step is written.
    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._is_claimed:
            return
        self._is_claimed = True
        if state.is_world_process_zero:
            with explained_write_errors(self.folder):
                self._replace(args)
        if args.world_size > 1:
            # Others would save the first checkpoint into a folder that is being emptied.
            args.distributed_state.wait_for_everyone()

    def _replace(self, args: Any) -> None:
        if args.resume_from_checkpoint is not None:
            self.options = used_options(self.options, args)
        if _resumes_here(args):
            save_options(self.folder, self.options)
            return
        for path in _left_behind(self.folder):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self._picture is None:
            (self.folder / BATCH_FILE).unlink(missing_ok=True)
        else:
            self._picture.replace(self.folder / BATCH_FILE)
        save_options(self.folder, self.options)


def save_options(folder: Path, options: dict[str, Any]) -> None:
    """Write what a run was told to `run.yaml`, from which it can be resumed; a token is left out."""
    kept = {name: value for name, value in options.items() if name not in _NOT_KEPT and value is not None}
    for name in _PATHS:
        if name in kept and Path(str(kept[name])).exists():
            kept[name] = str(Path(str(kept[name])).absolute())
    text = f"# entame finetune {folder / RUN_FILE} --resume_from_checkpoint last\n"
    write_text(folder / RUN_FILE, text + yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))


def last_checkpoint(args: TrainingArguments) -> str | None:
    """Find the checkpoint to resume from, if any; if one process does not find it, all refuse."""
    asked = args.resume_from_checkpoint
    if asked is None:
        return None
    return same_on_all(partial(find_checkpoint, asked, args))
