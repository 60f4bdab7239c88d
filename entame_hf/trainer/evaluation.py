"""A trainer whose evaluations count each example once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput

from ..metrics import IGNORED_LABEL, Evaluation, evaluation_metrics


class EvaluatingTrainer(Trainer):
    """A [`Trainer`] whose evaluations say the same however examples are cut into batches and spread over processes.

    The loss is the sum over all labels that count (-100 doesn't) divided by their number. Class weights scale what an
    example adds to the sum, and leave the number alone. A loss of the user's own must be a mean over the examples of a
    batch; one that divides by their weights, as torch's does, goes on depending on the batches.
    """

    args: Any
    gather_function: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Of each batch here: the sum of its loss, labels that count, examples.
        self._sums: list[Tensor] = []
        # Rows of a batch whose loss is what Trainer gathers next.
        self._rows: int | None = None

    # Trainer weighs the last batch's loss as a whole one, and the loss of fill-ups as one of their own.
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Metrics that evaluate something themselves have sums of their own.
        batches: list[Tensor] = []
        self._sums, self._rows = batches, None
        gather, average = self.gather_function, self.args.average_tokens_across_devices

        def gather_rows(values: Any) -> Any:
            # Trainer repeats a loss for a whole batch, whatever the size of this one.
            rows, self._rows = self._rows, None
            return gather(values if rows is None else values[:1].repeat(rows))

        self.gather_function = gather_rows
        # Each process has a mean loss of its own, over the examples that are its own.
        self.args.average_tokens_across_devices = False
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.gather_function, self.args.average_tokens_across_devices = gather, average
        if not batches:
            return output
        sums = self.accelerator.gather(torch.stack(batches))
        loss, labels, examples = sums.cpu().double().sum(0).tolist()
        name, metrics = f"{kwargs.get('metric_key_prefix', 'eval')}_loss", output.metrics or {}
        # Where all labels count, Trainer's mean over examples is right by now.
        if name in metrics and labels not in (0, examples):
            metrics[name] = loss / labels
        return output._replace(num_samples=int(examples))

    # accelerate fills the last batch up with examples that were counted before, so that all processes gather as many.
    # They stay out of the loss, and what is gathered is filled up instead: accelerate cuts it off again.
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        # Other inputs need not have a row an example.
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        rows = find_batch_size([main, inputs])
        if rows is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        own = self._own_rows(rows)
        # A process without an example of its own computes one, for what is gathered.
        used = max(own, 1)
        inputs, labels = _resize(inputs, rows, used), _resize(inputs.get("labels"), rows, own)
        loss, *predicted = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self._rows = None if loss is None else rows
        self._sums.append(self._sum(loss, labels, own))
        logits, label_ids = (_resize(values, used, rows) for values in predicted)
        return loss, logits, label_ids

    def _own_rows(self, rows: int) -> int:
        """Tell how many of the rows of a batch are not there to fill it up."""
        state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return rows
        return min(max(state.remainder - self.args.process_index * rows, 0), rows)

    def _sum(self, loss: Tensor | None, labels: Any, examples: int) -> Tensor:
        whole = torch.full((), float(examples), device=self.args.device)
        counted = whole
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            counted = (labels != IGNORED_LABEL).sum().to(whole)
        total = torch.zeros_like(whole) if loss is None else loss.to(whole) * counted
        # The mean over no label is not a number; others that are none Trainer leaves out where it is told to.
        counts = total.isfinite() if self.args.logging_nan_inf_filter else counted > 0
        total, counted = torch.where(counts, total, 0.0), torch.where(counts, counted, 0.0)
        return torch.stack([total, counted, whole])


def _resize(values: Any, rows: int, target: int) -> Any:
    """Cut off or fill up tensors of so many rows, in whatever they are nested."""

    def resize(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != rows:
            return tensor
        return tensor[torch.arange(target, device=tensor.device).clamp(max=rows - 1)]

    return values if target == rows else recursively_apply(resize, values)


# A matrix of 21,000 classes would take 3.5 GB.
MOST_CLASSES = 2000


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
