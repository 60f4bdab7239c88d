"""Cross-entropy for labels that are shares of classes, and for classes that count unequally."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from ..errors import InputError
from ..heads import base_model
from ..metrics import IGNORED_LABEL


class ClassificationLoss:
    """Compute cross-entropy from a model's outputs, in the place of [`Trainer`]'s label smoother.

    transformers' models take soft labels for several labels an image, and know no class weights. The mean is over
    examples, not over their weights: it is the same however they are split into micro-batches and processes.

    Args:
        epsilon (`float`, *optional*, defaults to 0): the share of each label that goes to all classes alike.
        class_weights (`torch.Tensor`, *optional*): (C,), how much each class counts; by default 1 each.
    """

    def __init__(self, epsilon: float = 0.0, class_weights: Tensor | None = None) -> None:
        self.epsilon, self.class_weights = epsilon, class_weights

    def __call__(self, outputs: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        """Compute the loss.

        Args:
            outputs: the model's, with its logits (N, *, C) or a tuple of those of several heads, of which the first
                counts.
            labels (`torch.Tensor`): int64 (N, *), or floating (N, C): a share of each class. -100 is left out.

        Returns:
            `torch.Tensor`: a scalar, the mean over labels that count.
        """
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        logits = (logits[0] if isinstance(logits, tuple) else logits).float()
        weights = None if self.class_weights is None else self.class_weights.to(logits)
        if labels.is_floating_point():
            count: Any = len(labels)
            labels = labels.float()
        else:
            # Of each position, where there are several.
            logits, labels = logits.flatten(0, -2), labels.flatten()
            count = (labels != IGNORED_LABEL).sum()
        total = cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=self.epsilon)
        return total / count


def are_shares(labels: Any, model: Any) -> bool:
    """Tell whether labels are shares of classes, one row an example, and not several labels each.

    Only the model's `config.problem_type` can say the latter: `"multi_label_classification"`.
    """
    rows = isinstance(labels, Tensor) and labels.is_floating_point() and labels.ndim == 2
    return rows and _problem_type(model) != "multi_label_classification"


def are_classes(labels: Any, model: Any) -> bool:
    """Tell whether labels are one class an example, and the model one whose loss for them is cross-entropy.

    transformers' models are, unless they were given a loss function; a forward of somebody else's may compute another
    loss.
    """
    base = base_model(model)
    own = type(base).forward.__module__.startswith("transformers.")
    known = own and base.loss_function is ForSequenceClassificationLoss
    indices = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim == 1
    return known and indices and _problem_type(base) in (None, "single_label_classification")


def check_one_class(model: Any) -> None:
    """Make sure that a model's images have one class each, or shares of classes, as our loss is about.

    Raises:
        InputError: its `config.problem_type` says that they have several labels.
    """
    if _problem_type(model) == "multi_label_classification":
        raise InputError(
            "class_weights are about images of one class, and this model's problem_type is "
            "multi_label_classification. Leave them out, or give compute_loss_func."
        )


def _problem_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "problem_type", None)
