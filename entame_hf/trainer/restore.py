"""Restore from a checkpoint's state what Trainer leaves out: the best checkpoint, callbacks, the place in a stream."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length
from transformers.utils import logging

from ..data import BatchDataset

logger = logging.get_logger(__name__)


def restore_state(trainer: Any, checkpoint: str | None, place: tuple[int, int]) -> tuple[int, int]:
    """Complete the state that Trainer has read from a checkpoint, and say if the run has no step left.

    `place` is where Trainer would resume: epochs that had ended, and batches of the one that had not. Returned is
    where the checkpoint's run was.
    """
    state = trainer.state
    if checkpoint is None:
        return place
    if state.global_step >= state.max_steps:
        logger.warning(
            f"The checkpoint is at step {state.global_step:,} already, so no step is taken. To train further, set "
            f"`max_steps` above it, or a larger `num_train_epochs`."
        )
    _restore_callbacks(trainer.callback_handler.callbacks, state)
    if state.best_model_checkpoint is None and state.best_global_step:
        # Beside the checkpoint: the run may write to another folder.
        best = Path(checkpoint).with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if best.is_dir():
            state.best_model_checkpoint = str(best)
        else:
            logger.warning(f"The best checkpoint so far, {best.name}, is gone: only a better one can replace it.")
    return _place_in_stream(trainer, checkpoint, place) if place[1] else place


def _restore_callbacks(callbacks: list[Any], state: Any) -> None:
    """Restore what callbacks have counted, such as evaluations without improvement; their settings are this run's."""
    for name, saved in state.stateful_callbacks.items():
        known = [callback for callback in callbacks if type(callback).__name__ == name]
        for callback, values in zip(known, saved if isinstance(saved, list) else [saved], strict=False):
            vars(callback).update(values.get("attributes", {}))


def _place_in_stream(trainer: Any, checkpoint: str, place: tuple[int, int]) -> tuple[int, int]:
    """Tell how often a checkpoint's run has read a stream, and how many batches of the pass that had not ended.

    Trainer takes all steps of a run for one pass.
    """
    dataset = trainer.train_dataset
    if not isinstance(dataset, IterableDataset) or has_length(dataset):
        return place
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    # As Trainer counts: whole passes, and batches of this one over those of the run.
    epoch = state.epoch or 0.0
    passes = max(math.ceil(epoch) - 1, 0)
    batches = round((epoch - passes) * state.max_steps * trainer.args.gradient_accumulation_steps)
    if isinstance(dataset, BatchDataset):
        # Its row numbers say what was read: Trainer would draw the batches that it skips.
        trainer.batch_maker.skip(batches)
    return passes, batches
