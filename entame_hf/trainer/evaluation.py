"""Evaluations that count each example once, and what they said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ..errors import InputError
from ..heads import Head, num_classes
from ..metrics import (
    IGNORED_LABEL,
    PREFIX,
    Evaluation,
    classes_and_confidence,
    confident_errors,
    evaluation_metrics,
    label_indices,
    measured_names,
)

# Where torch's modules keep their tensors.
_TABLES = ("_parameters", "_buffers")


class EvaluationSums:
    """Sum up an evaluation's loss, so that it does not depend on batches and processes.

    The loss is the sum over all labels that count (-100 does not) divided by their number. Class weights scale what an
    example adds to the sum, and leave the number alone. A loss of the user's own must be a mean over the examples of a
    batch; one that divides by their weights, as torch's does, still depends on the batches.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        # Of each batch here: the sum of its loss, labels that count, examples.
        self._batches: list[Tensor] = []
        # Rows of a batch whose loss is what Trainer gathers next.
        self._rows: int | None = None

    def gathering(self, gather: Any) -> Any:
        """Wrap Trainer's `gather_function`, which gets a loss as often as a whole batch has rows."""

        def gather_rows(values: Any) -> Any:
            rows, self._rows = self._rows, None
            return gather(values if rows is None else values[:1].repeat(rows))

        return gather_rows

    def add(self, loss: Tensor | None, labels: Any, examples: int, rows: int) -> None:
        """Add a batch: its mean loss, the labels of its own `examples`, and its rows with those that fill it up."""
        self._rows = None if loss is None else rows
        number = torch.full((), float(examples), device=self.args.device)
        counted = number
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            counted = (labels != IGNORED_LABEL).sum().to(number)
        total = torch.zeros_like(number) if loss is None else loss.to(number) * counted
        # NaN if every label is ignored; other non-finite losses are dropped if logging_nan_inf_filter is set.
        counts = total.isfinite() if self.args.logging_nan_inf_filter else counted > 0
        total, counted = torch.where(counts, total, 0.0), torch.where(counts, counted, 0.0)
        self._batches.append(torch.stack([total, counted, number]))

    def correct(self, output: EvalLoopOutput, name: str, accelerator: Accelerator) -> EvalLoopOutput:
        """Put the loss and the number of examples right in the output of Trainer's loop, in all processes together."""
        if not self._batches:
            return output
        sums = accelerator.gather(torch.stack(self._batches))
        loss, labels, examples = sums.cpu().double().sum(0).tolist()
        metrics = output.metrics or {}
        # Where all labels count, Trainer's mean over examples is right by now.
        if name in metrics and labels not in (0, examples):
            metrics[name] = loss / labels
        return output._replace(num_samples=int(examples))


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Convert metrics to types that JSON has: NumPy's numbers and arrays, and tensors."""
    return {name: _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain_numbers(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic | Tensor) else value


def own_rows(rows: int, args: Any, accelerator: Accelerator) -> int:
    """Tell how many of the rows of a batch do not merely fill it up.

    accelerate fills the last batch up with examples that were counted before, so that all processes gather as many.
    """
    state = accelerator.gradient_state
    if args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return rows
    return min(max(state.remainder - args.process_index * rows, 0), rows)


def resize_rows(values: Any, rows: int, target: int) -> Any:
    """Cut off or fill up tensors of so many rows, in whatever they are nested."""

    def resize(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or len(tensor) != rows:
            return tensor
        return tensor[torch.arange(target, device=tensor.device).clamp(max=rows - 1)]

    return values if target == rows else recursively_apply(resize, values)


# A matrix of 21,000 classes would take 3.5 GB.
MOST_CLASSES = 2000


class Evaluations(TrainerCallback):
    """Remember which classes a model confuses, and whether its weights are the best checkpoint's.

    Two matrices of C×C counts are kept at most: the last evaluation's and the best one's. Above 2,000 classes there
    are none. What is measured on the training images is left out.
    """

    def __init__(self) -> None:
        # Whether the training images are evaluated now, or which split; and the entries of the log about the former.
        self.is_of_training = False
        self.split: str | None = None
        self._of_training: set[int] = set()
        self._observed: dict[int, dict[str, Any]] = {}
        # The best checkpoint's, if the model holds its weights.
        self.loaded_step: int | None = None

    def begin(self, trainer: Any, dataset: Any, given: Any) -> None:
        """Note what is evaluated next; `given` to the evaluation, if it is none of the trainer's own."""
        sets = trainer.eval_dataset
        self.is_of_training = given is not None and trainer.train_dataset is given is not sets
        self.split = None if isinstance(sets, dict) else getattr(dataset, "name", None)

    def observe(self, output: EvalLoopOutput, state: TrainerState, heads: Callable[[], list[Head]]) -> None:
        """Count the predictions of an evaluation by class, and find the errors that the model is most confident of."""
        if self.is_of_training:
            return
        now = state.global_step
        self._observed = {step: seen for step, seen in self._observed.items() if step == state.best_global_step != now}
        predictions, labels = output.predictions, label_indices(output.label_ids)
        first = predictions[0] if isinstance(predictions, tuple) and predictions else predictions
        self._observed[now] = {"split": self.split}
        if not isinstance(first, np.ndarray) or labels is None:
            return
        # Of a model without a known head, rows of any length may be logits.
        with suppress(InputError):
            if first.ndim == 2 and first.shape[1] != num_classes(heads()[0].module):
                return
        predicted, _ = classes_and_confidence(predictions)
        if predicted.shape != labels.shape or labels.dtype.kind + predicted.dtype.kind != "ii":
            return
        self._observed[now]["errors"] = confident_errors(predictions, labels)
        counted = labels >= 0
        labels, predicted = labels[counted].astype(np.int64), predicted[counted].astype(np.int64)
        seen = 1 + max(labels.max(initial=-1), predicted.max(initial=-1))
        if 0 < seen <= MOST_CLASSES:
            cells = np.bincount(labels * seen + predicted, minlength=seen**2)
            self._observed[now]["confusion"] = cells.reshape(seen, seen)

    # After it was logged.
    def on_evaluate(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.is_of_training:
            self._of_training.add(len(state.log_history) - 1)

    # After the best checkpoint was loaded, unless somebody had removed it.
    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        self.loaded_step = state.best_global_step if best is not None and Path(best).is_dir() else None

    def current(self, state: TrainerState) -> Evaluation:
        """Find what is known of the weights that the model holds.

        The last evaluation since training ended; where there is none, the best checkpoint's if it was loaded, else the
        last one in training.
        """
        history = [{} if index in self._of_training else entry for index, entry in enumerate(state.log_history)]
        ended = max((index for index, entry in enumerate(history) if "train_runtime" in entry), default=None)
        best = None if ended is None else self.loaded_step
        since = [entry for entry in history[(ended or 0) :] if evaluation_metrics(entry)]
        before = [entry for entry in history if evaluation_metrics(entry) and best in (None, entry["step"])]
        chosen = since or before
        if not chosen:
            return Evaluation({}, best)
        step = int(chosen[-1]["step"])
        # Several evaluation sets have an entry each.
        entries = [evaluation_metrics(entry) for entry in chosen if entry["step"] == step]
        metrics = {name: value for entry in entries for name, value in entry.items()}
        tests = [evaluation_metrics(entry, "test_") for entry in history[(ended or 0) :] if entry.get("step") == step]
        test = {name: value for entry in tests for name, value in entry.items()}
        return Evaluation(metrics, step if best is None else best, **self._observed.get(step, {}), test=test)


def check_metrics(trainer: Trainer) -> None:
    """Make sure, as far as it is known, that evaluations measure `metric_for_best_model`: Trainer asks the first one.

    Raises:
        InputError: they do not, such as the loss of several evaluation sets, which have one each; or
            `metrics_of_predictions()` would get batches that are not joined.
    """
    args, compute, sets = trainer.args, trainer.compute_metrics, trainer.eval_dataset
    if compute is not None and measured_names(compute) and not args.eval_do_concat_batches:
        raise InputError(
            "`eval_do_concat_batches=False` leaves predictions in batches, which metrics_of_predictions() does not "
            "take. Leave it out, or give `compute_metrics` of your own."
        )
    metric = args.metric_for_best_model
    # An evaluation of the user's own may measure anything.
    if metric is None or args.eval_strategy == "no" or type(trainer).evaluate is not Trainer.evaluate:
        return
    names = measured_names(None if args.prediction_loss_only else compute)
    prefixes = [f"{name}_" for name in sets] if isinstance(sets, dict) else [""]
    rests = [metric.removeprefix(PREFIX).removeprefix(each) for each in prefixes]
    found = [f"{a}{b}" for a, b in zip(prefixes, rests, strict=True) if names is None or b in names]
    if metric.removeprefix(PREFIX) in found:
        return
    known = [f"{prefix}{name}" for prefix in prefixes for name in names or ("loss", "...")]
    own = ", or give `compute_metrics`" if compute is None else ""
    raise InputError(
        f"`metric_for_best_model={metric}` is not measured. Use one of {', '.join(known)}{own}: "
        f"`metric_for_best_model={known[0]}`."
    )


@contextmanager
def unchanged_weights(model: nn.Module, args: TrainingArguments, in_training: bool) -> Iterator[None]:
    """Keep a model's weights while Trainer evaluates a copy in half precision, which it makes in their place.

    Trainer casts nothing while `train()` runs.
    """
    if in_training or not (args.fp16_full_eval or args.bf16_full_eval):
        yield
        return
    modules = list(model.modules())
    tables = [(vars(module)[name], dict(vars(module)[name])) for module in modules for name in _TABLES]
    values = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    finally:
        for table, before in tables:
            table.update(before)
        for parameter, value in values:
            parameter.data = value
