"""Checkpoints that are written whole or not at all, and which of them a run resumes from."""

from __future__ import annotations

import json
import math
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging
from xxhash import xxh3_64

from ..errors import InputError, NonFiniteError
from ..files import explained_write_errors, write_text
from ..metrics import IGNORED_LABEL
from .checkpoint import forget_local_base
from .provenance import save_provenance

logger = logging.get_logger(__name__)

# Lists the files of a checkpoint with their sizes and hashes. It is empty while the checkpoint is written, and filled
# last. Checkpoints of stock Trainer have none.
MANIFEST = "checkpoint_files.json"

# What resuming needs, as Trainer, peft, FSDP and DeepSpeed name it. Trainer starts over silently what it lacks.
_NEEDED = {
    "weights": ("*model*.safetensors", "*model*.bin", "pytorch_model_fsdp*", "global_step*"),
    "optimizer": ("optimizer.pt", "optimizer.bin", "optimizer_*", "pytorch_model_fsdp*", "global_step*"),
    "scheduler.pt": ("scheduler.pt", "global_step*"),
    "rng_state.pth": ("rng_state*.pth",),
}


def damage(checkpoint: str | Path) -> str | None:
    """Tell what is missing, incomplete or damaged in a checkpoint; None if it is intact."""
    folder = Path(checkpoint)
    if is_incomplete(folder):
        return "its writing never ended"
    return _damaged_state(folder / TRAINER_STATE_NAME) or _damaged_files(folder)


def is_incomplete(checkpoint: Path) -> bool:
    """Tell whether the writing of a checkpoint began and did not end."""
    try:
        if (checkpoint / MANIFEST).exists():
            return not (checkpoint / MANIFEST).stat().st_size
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        return True
    return False


def _damaged_state(file: Path) -> str | None:
    if not file.is_file():
        return f"it has no {TRAINER_STATE_NAME}"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return f"{TRAINER_STATE_NAME} is no JSON"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return f"{TRAINER_STATE_NAME} does not say after which step it was written"
    # Saved as a dictionary.
    kinds = {**get_type_hints(TrainerState), "stateful_callbacks": dict | None}
    if unknown := sorted(state.keys() - kinds):
        return (
            f"{TRAINER_STATE_NAME} has keys that transformers {transformers.__version__} does not know "
            f"({', '.join(unknown[:3])}): install the version that wrote it"
        )
    odd = [name for name, value in state.items() if not _is_of(value, kinds[name])]
    odd += [] if odd or all(isinstance(entry, dict) for entry in state.get("log_history", ())) else ["log_history"]
    return f"{odd[0]} in {TRAINER_STATE_NAME} has a value of another type" if odd else None


def _is_of(value: Any, hint: Any) -> bool:
    kinds = (
        {get_origin(kind) or kind for kind in get_args(hint) or (hint,)} if get_origin(hint) is not list else {list}
    )
    return isinstance(value, tuple(kinds)) or (isinstance(value, Real) and bool(kinds & {int, float}))


def _damaged_files(folder: Path) -> str | None:
    listed = _read_manifest(folder)
    if listed is None:
        return f"{MANIFEST} cannot be read"
    for name, entry in listed.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if entry != [(folder / name).stat().st_size, _hash(folder / name)]:
            return f"{name} is damaged: it is not what was saved"
    lacking = [name for name, patterns in _NEEDED.items() if not any(any(folder.glob(each)) for each in patterns)]
    if lacking[:1] == ["optimizer"]:
        return (
            "it holds the model alone (`save_only_model=True`), and the optimizer and the schedule would start over. "
            "Start a new run from it"
        )
    if lacking:
        return f"it has no {lacking[0]}"
    for file in sorted(folder.iterdir()) if not listed else ():
        if file.suffix == ".safetensors" and not _is_safetensors(file):
            return f"{file.name} is cut off"
        if file.suffix in (".pt", ".pth") and not zipfile.is_zipfile(file):
            return f"{file.name} is cut off"
    return None


def _read_manifest(folder: Path) -> dict[str, list[Any]] | None:
    """Read which files a checkpoint has: empty without a manifest, None if it cannot be read."""
    file = folder / MANIFEST
    if not file.exists():
        return {}
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return listed if isinstance(listed, dict) else None


def _hash(file: Path) -> str:
    digest = xxh3_64()
    with file.open("rb") as stream:
        while chunk := stream.read(2**24):
            digest.update(chunk)
    return digest.hexdigest()


def _is_safetensors(file: Path) -> bool:
    try:
        # The header says how long the file is.
        with safe_open(str(file), framework="pt"):
            return True
    except SafetensorError:
        return False


def last_intact_checkpoint(folder: str | Path) -> str | None:
    """Find the newest intact checkpoint of an output folder, by its step, and name the ones after it."""
    for checkpoint in reversed(list_checkpoints(folder)):
        reason = damage(checkpoint)
        if reason is None:
            return str(checkpoint)
        logger.warning(f"Skipping {checkpoint}, which cannot be resumed from: {reason}.")
    return None


def asks_for_last(asked: str | Literal[True]) -> bool:
    """Tell whether `resume_from_checkpoint` asks for the newest intact checkpoint of the output folder."""
    return asked is True or asked.lower() in ("last", "true")


def find_checkpoint(asked: str | Literal[True], args: TrainingArguments) -> str:
    """Find the checkpoint that a run resumes from; see [`asks_for_last`].

    Raises:
        InputError: there is none, or it cannot be resumed from.
    """
    folder = str(args.output_dir)
    newest = asks_for_last(asked)
    with args.main_process_first(desc="looking for the last intact checkpoint"):
        found = last_intact_checkpoint(folder) if newest else str(asked)
        missing = found is None or not Path(found).is_dir()
        reason = "there is no checkpoint there" if missing else damage(str(found))
        if found is None or reason is not None:
            other = f"`resume_from_checkpoint=last` (True in Python) for the newest one in the output folder {folder}"
            other = f"start {folder} anew, without `resume_from_checkpoint`" if newest else other
            raise InputError(
                f"`resume_from_checkpoint={asked}`: {reason}. Give the folder of an intact checkpoint, or {other}."
            )
    return found


@contextmanager
def written_whole(trainer: Any, folder: Path) -> Iterator[None]:
    """Let a checkpoint count only if all of it is written, and then remove the oldest one; see [`remove_oldest`].

    Nothing is written if the weights are not finite. A folder whose writing fails is removed.
    """
    args, manifest = trainer.args, folder / MANIFEST
    limit, is_writer = args.save_total_limit, args.should_save
    check_finite(trainer.model, args, trainer.state)
    with explained_write_errors(folder):
        try:
            if is_writer:
                folder.mkdir(parents=True, exist_ok=True)
                manifest.write_text("")
            yield
            # Other processes write files of their own.
            trainer.accelerator.wait_for_everyone()
            if is_writer:
                _forget_place(folder / TRAINER_STATE_NAME)
                if args.push_to_hub:
                    # Before the files are listed: what changes afterwards counts as damaged.
                    forget_local_base(folder)
                save_provenance(trainer.provenance, folder)
                files = sorted(file for file in folder.rglob("*") if file.is_file() and file != manifest)
                listed = {str(file.relative_to(folder)): [file.stat().st_size, _hash(file)] for file in files}
                write_text(manifest, json.dumps(listed, indent=2) + "\n")
        except BaseException:
            if is_writer and is_incomplete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            raise
    if is_writer:
        remove_oldest(folder, limit, trainer.state.best_model_checkpoint)


def _forget_place(file: Path) -> None:
    """Remove this machine's path of the best checkpoint; [`restore_state`] finds it by its step."""
    state = json.loads(file.read_text(encoding="utf-8"))
    write_text(file, json.dumps({**state, "best_model_checkpoint": None}, indent=2, sort_keys=True) + "\n")


def remove_oldest(newest: Path, limit: int | None, best: str | None) -> None:
    """Keep so many checkpoints of a run, the newest and the best among them, and no incomplete one.

    Trainer orders them by time, so a clock that is behind makes it remove each checkpoint that it has just written.
    """
    for checkpoint in list_checkpoints(newest.parent):
        if is_incomplete(checkpoint):
            logger.warning(f"Removing {checkpoint}, whose writing never ended.")
            shutil.rmtree(checkpoint, ignore_errors=True)
    if limit is None or limit <= 0:
        return
    kept = {newest.absolute(), Path(best or newest).absolute()}
    others = [path for path in list_checkpoints(newest.parent) if path.absolute() not in kept]
    for checkpoint in others[: max(0, len(others) + len(kept) - limit)]:
        shutil.rmtree(checkpoint, ignore_errors=True)


def list_checkpoints(folder: str | Path) -> list[Path]:
    """List the checkpoints of a run by their steps. A folder that was renamed is the user's."""
    found = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    numbered = [path for path in found if path.is_dir() and re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name)]
    return sorted(numbered, key=lambda path: int(path.name.rpartition("-")[2]))


def has_finite_weights(model: nn.Module) -> bool:
    """Check whether the parameters and buffers of a model are finite."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    # FSDP2 shards parameters, not buffers, and torch takes no norm of both together.
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    whole = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    norms = [get_total_norm(kind) for kind in (sharded, whole)]
    return all((norm.full_tensor() if isinstance(norm, DTensor) else norm).isfinite() for norm in norms)


def check_finite(
    model: nn.Module, args: TrainingArguments, state: TrainerState, losses: Mapping[str, float] = MappingProxyType({})
) -> None:
    """Stop a training whose logged losses, or whose model, are not finite any more."""
    bad, is_finite = [name for name, loss in losses.items() if not math.isfinite(loss)], has_finite_weights(model)
    if is_finite and not bad:
        return
    what = "Weights of the model are not finite"
    if bad:
        what = f"{'The training loss' if bad[0] in ('loss', 'train_loss') else bad[0]} is {losses[bad[0]]}"
    kept = last_intact_checkpoint(str(args.output_dir)) if args.save_strategy != "no" else None
    raise NonFiniteError(
        f"{what} after step {state.global_step}, so the training stopped and saved no model. Try a lower "
        f"`learning_rate={args.learning_rate / 10:g}`"
        + (", or bfloat16 (`bf16=True`) in place of float16" if args.fp16 or args.fp16_full_eval else "")
        + (f"; a batch whose labels are all {IGNORED_LABEL} has no loss either" if is_finite else "")
        + (f". The last good checkpoint is {kept}." if kept else ". No checkpoint was saved before it.")
    )
