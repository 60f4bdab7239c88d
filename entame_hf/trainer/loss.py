"""Losses: class weights, shares of classes, a loss of the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import logging

from ..errors import InputError
from ..heads import num_classes
from ..layers import widen
from ..metrics import IGNORED_LABEL
from .labels import has_several_labels

logger = logging.get_logger(__name__)


class ClassificationLoss:
    """Compute cross-entropy from a model's outputs, in the place of [`Trainer`]'s label smoother.

    transformers' models take soft labels for several labels an image, and know no class weights. The mean is over
    examples, not over their weights: it is the same however they are split into micro-batches and processes.
    """

    def __init__(self, epsilon: float = 0.0, class_weights: Tensor | None = None) -> None:
        self.epsilon, self.class_weights, self.was_called = epsilon, class_weights, False

    def __call__(self, outputs: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        """Compute the mean over labels that count.

        Args:
            outputs: the model's, with its logits (N, *, C) or a tuple of those of several heads, of which the first
                counts.
            labels (`torch.Tensor`): int64 (N, *), or floating (N, C): a share of each class. -100 is left out.
        """
        self.was_called = True
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        logits = widen(logits[0] if isinstance(logits, tuple) else logits)
        weights = None if self.class_weights is None else self.class_weights.to(logits)
        if labels.is_floating_point():
            count: Any = len(labels)
            labels = labels.to(logits)
        else:
            # Of each position, where there are several.
            logits, labels = logits.flatten(0, -2), labels.flatten()
            count = (labels != IGNORED_LABEL).sum()
        total = cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=self.epsilon)
        return total / count


def choose_loss(trainer: Any, class_weights: Tensor | None = None) -> None:
    """Let a trainer compute the loss that its arguments ask for, which a search changes between trainings.

    Trainer reads them once, and its own label smoother takes the logarithm in the dtype of the logits.

    Raises:
        InputError: labels are to be smoothed of a model whose images have several each.
    """
    known, epsilon = trainer.label_smoother, trainer.args.label_smoothing_factor
    if epsilon and trainer.compute_loss_func is None and has_several_labels(trainer.model):
        raise InputError(
            f"`label_smoothing_factor={epsilon:g}` is about images of one class, and this model's problem_type is "
            "multi_label_classification. Leave it out, or give compute_loss_func."
        )
    if isinstance(known, ClassificationLoss):
        known.epsilon = epsilon
    elif class_weights is not None or (epsilon and type(known) in (type(None), LabelSmoother)):
        trainer.label_smoother = ClassificationLoss(epsilon, class_weights)


class CustomLoss:
    """Call a user's `compute_loss_func`, and make a plain mean of it independent of gradient accumulation.

    `Trainer` passes `num_items_in_batch`, the number of labels in all micro-batches and processes of a step, and wants
    the sum over the micro-batch divided by it. A function that ignores the number and returns a mean would give
    gradients that grow with accumulation (transformers#34198). The first call of a step that has several micro-batches
    or processes finds out which of the two it returns.
    """

    def __init__(self, function: Callable[..., Any], args: TrainingArguments) -> None:
        self.function, self.args = function, args
        self._returns_mean: bool | None = None
        if args.label_smoothing_factor:
            logger.warning(
                f"`label_smoothing_factor={args.label_smoothing_factor:g}` has no effect: compute_loss_func computes "
                "the loss. Leave one of them out."
            )

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        is_split = self.args.gradient_accumulation_steps > 1 or self.args.world_size > 1
        if is_split and self._returns_mean is None and num_items_in_batch is not None and torch.is_grad_enabled():
            self._returns_mean = self._compare(outputs, labels, num_items_in_batch)
        loss = self.function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if not self._returns_mean or num_items_in_batch is None:
            return loss
        # As Trainer counts them.
        return loss * (labels.ne(IGNORED_LABEL).sum() / num_items_in_batch)

    @torch.no_grad()
    def _compare(self, outputs: Any, labels: Any, number: Any) -> bool | None:
        """Tell whether the function ignores the number; `None` if the loss is 0 or not finite."""
        devices = [labels.device] if labels.is_cuda else []
        values = []
        for factor in (1, 2):
            # The same random numbers for both, and for the call that counts.
            with torch.random.fork_rng(devices):
                values.append(float(self.function(outputs, labels, num_items_in_batch=factor * number)))
        first, second = values
        if first == 0 or not math.isfinite(first):
            return None
        ratio = first / second if second else math.inf
        if abs(ratio - 1) < 0.01 or abs(ratio - 2) < 0.02:
            return ratio < 1.5
        raise InputError(
            f"compute_loss_func returns {first:.4g} for num_items_in_batch={int(number)} and {second:.4g} for twice "
            "that: part of it is divided by the number and part is not. Return a mean over the examples, or the sum "
            "divided by num_items_in_batch."
        )


def scales_loss(trainer: Any) -> bool:
    """Tell whether a trainer scales its loss, as float16 needs it, and skips steps that overflow."""
    return trainer.accelerator.scaler is not None or (trainer.is_deepspeed_enabled and trainer.args.fp16)


class LossFilter:
    """Keep losses that are not finite out of Trainer's running sum, which would be NaN for ever after.

    Loss scaling skips the steps whose losses overflowed in float16, and `logging_nan_inf_filter` asks for it. The
    logged mean is over the other losses: NaN if there are none, where Trainer's own filter logs 0.
    """

    def __init__(self) -> None:
        # Micro-batches, and those with a finite loss: since the last logging step, and of the run.
        self._recent: Tensor | None = None
        self._all: Tensor | None = None

    def __call__(self, loss: Tensor) -> Tensor:
        """Replace a micro-batch's loss by 0 if it is not finite."""
        finite = loss.isfinite()
        counts = torch.stack([torch.ones_like(loss), finite.to(loss)])
        self._recent = counts if self._recent is None else self._recent + counts
        self._all = counts if self._all is None else self._all + counts
        return torch.where(finite, loss, 0.0)

    def correct(self, logs: dict[str, Any]) -> None:
        """Turn logged means over all micro-batches into means over those with a finite loss."""
        for name, counts in {"loss": self._recent, "train_loss": self._all}.items():
            if name in logs and counts is not None:
                total, finite = counts.tolist()
                logs[name] = logs[name] * total / finite if finite else math.nan
                self._recent = None


def read_class_weights(weights: Any, trainer: Any) -> Tensor:
    """Convert class weights to a tensor (C,).

    Raises:
        InputError: the loss is the user's own, the model's images have several labels each, or the weights are not one
            finite number a class.
    """
    if trainer.compute_loss_func is not None:
        raise InputError(
            "compute_loss_func computes the loss, and class_weights have no effect on it. Give one of them."
        )
    if has_several_labels(trainer.model):
        raise InputError(
            "class_weights are about images of one class, and this model's problem_type is "
            "multi_label_classification. Leave them out, or give compute_loss_func."
        )
    classes = num_classes(trainer.heads()[0].module)
    try:
        tensor = torch.as_tensor(weights)
    # Lists of other things than numbers.
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"`class_weights` are no numbers ({error}). Give one for each of {classes} classes."
        ) from error
    if tensor.shape != (classes,):
        shape = " × ".join(map(str, tensor.shape)) or "1"
        raise InputError(f"`class_weights` has {shape} values, and the model {classes} classes. Give one a class.")
    tensor = tensor if tensor.is_floating_point() else tensor.float()
    if not (tensor.isfinite() & (tensor >= 0)).all() or not tensor.any():
        raise InputError(
            "`class_weights` has values that are negative or not finite, or only zeros. Give 1 for classes as they "
            "are."
        )
    return tensor
