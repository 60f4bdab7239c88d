"""What the evaluations of a run said, and which of them is about the weights that the model holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

PREFIX = "eval_"
# A matrix of 21,000 classes would take 3.5 GB.
MOST_CLASSES = 2000
# What Trainer measures of the machine, not of the model.
_OF_THE_MACHINE = ("_runtime", "_per_second", "_time", "_delta")


def evaluation_metrics(entry: Mapping[str, Any]) -> dict[str, float]:
    """Get what an evaluation measured of the model, from a line of a log history; empty for other lines.

    Args:
        entry (`dict`): one entry of `trainer.state.log_history`.

    Returns:
        `dict[str, float]`: without the prefix `eval_`, such as `{"loss": 0.3, "accuracy": 0.9}`.
    """
    return {
        key.removeprefix(PREFIX): value
        for key, value in entry.items()
        if key.startswith(PREFIX) and isinstance(value, (int, float)) and not key.endswith(_OF_THE_MACHINE)
    }


class Evaluation(NamedTuple):
    """What is known of the weights that a model holds.

    Args:
        metrics (`dict[str, float]`): see [`evaluation_metrics`]; empty where nothing was evaluated.
        step (`int`, *optional*): the optimizer step that the weights are of.
        confusion (`numpy.ndarray` of shape `(M, M)`, *optional*):
            Counts of examples, true classes by predicted ones, up to the last class that was seen: M ≤ C.
    """

    metrics: dict[str, float]
    step: int | None
    confusion: np.ndarray | None


class Evaluations(TrainerCallback):
    """Remember what a model confused when it was evaluated, and whether its weights are the best checkpoint's.

    Two matrices of C×C counts are kept at most: the last evaluation's and the best one's. Above 2,000 classes there
    are none.
    """

    def __init__(self) -> None:
        self._confusions: dict[int, np.ndarray] = {}
        self._loaded_step: int | None = None

    def observe(self, output: EvalLoopOutput, state: TrainerState) -> None:
        """Count what the model confused, where an evaluation kept its predictions.

        Args:
            output (`EvalLoopOutput`): with a row of logits or a predicted class for every example; others are passed.
            state (`TrainerState`): says at which step, and which evaluation was the best until now.
        """
        now = state.global_step
        self._confusions = {s: m for s, m in self._confusions.items() if s == state.best_global_step != now}
        predictions, labels = output.predictions, output.label_ids
        if isinstance(predictions, tuple) and predictions:
            predictions = predictions[0]
        if not isinstance(predictions, np.ndarray) or not isinstance(labels, np.ndarray):
            return
        if predictions.ndim == 2:
            predictions = predictions.argmax(axis=-1)
        if labels.ndim != 1 or predictions.shape != labels.shape or labels.dtype.kind + predictions.dtype.kind != "ii":
            return
        counted = labels >= 0
        labels, predictions = labels[counted].astype(np.int64), predictions[counted].astype(np.int64)
        classes = 1 + max(labels.max(initial=-1), predictions.max(initial=-1))
        if 0 < classes <= MOST_CLASSES:
            cells = np.bincount(labels * classes + predictions, minlength=classes**2)
            self._confusions[now] = cells.reshape(classes, classes)

    # After the best checkpoint was loaded, unless somebody had removed it.
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        self._loaded_step = state.best_global_step if best is not None and Path(best).is_dir() else None

    def current(self, state: TrainerState) -> Evaluation:
        """Find what is known of the weights that the model holds.

        Args:
            state (`TrainerState`): its log history is read.

        Returns:
            [`Evaluation`]: the last one since training ended; where there is none, the best checkpoint's if it was
            loaded, else the last one in training.
        """
        history = state.log_history
        ended = max((index for index, entry in enumerate(history) if "train_runtime" in entry), default=None)
        best = None if ended is None else self._loaded_step
        since = [entry for entry in history[(ended or 0) :] if evaluation_metrics(entry)]
        before = [entry for entry in history if evaluation_metrics(entry) and best in (None, entry["step"])]
        chosen = since or before
        if not chosen:
            return Evaluation({}, best, None)
        step = int(chosen[-1]["step"])
        # Several evaluation sets have an entry each.
        entries = [evaluation_metrics(entry) for entry in chosen if entry["step"] == step]
        metrics = {name: value for entry in entries for name, value in entry.items()}
        return Evaluation(metrics, step if best is None else best, self._confusions.get(step))
