"""Labels: what they are, and their conversion to what losses take."""

from __future__ import annotations

from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.utils import logging

from ..data import BatchDataset, known_classes, known_labels
from ..errors import InputError, printable
from ..heads import base_model, num_classes
from ..metrics import IGNORED_LABEL, SHARE_TOLERANCE
from ..patch import class_names

logger = logging.get_logger(__name__)


class LabelReader:
    """Convert labels to what losses take: int64 class indices, or float rows with a value a class.

    Rows must sum to 1, and indices must be classes of the model. Both are compared on the device: at once for the
    first batch and on the CPU, else when [`verify`] is called, because every comparison waits for the device. Until
    then an index out of range counts as the nearest class: CUDA's own check ends the process. With `has_own_loss`,
    negative indices are for a loss of the user's own.
    """

    def __init__(self, has_own_loss: bool = False) -> None:
        self.has_own_loss = has_own_loss
        self._worst: Tensor | None = None
        self._range: Tensor | None = None
        self._classes = 0
        self._has_read = False

    def __call__(self, inputs: Any, model: Any) -> Any:
        """Convert the labels of a batch, which is returned as it is if they need no conversion."""
        labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or _problem_type(model) == "regression":
            return inputs
        classes: Any = getattr(getattr(model, "config", None), "num_labels", None)
        converted = self._convert(labels, classes, model)
        are_indices = bool(classes and classes > 1 and not converted.is_floating_point() and converted.numel())
        if are_indices:
            self._note_range(converted, classes)
        if not self._has_read or labels.device.type == "cpu":
            self._has_read = True
            self.verify()
        elif are_indices:
            counted = self._counted(converted)
            converted = torch.where(counted, converted.clamp(0, classes - 1), converted)
        return inputs if converted is labels else {**inputs, "labels": converted}

    def _counted(self, indices: Tensor) -> Tensor:
        return indices >= 0 if self.has_own_loss else indices != IGNORED_LABEL

    @torch.no_grad()
    def _note_range(self, indices: Tensor, classes: int) -> None:
        ends = torch.stack(torch.aminmax(torch.where(self._counted(indices), indices, 0)))
        if self._range is not None:
            ends = torch.stack([torch.minimum(ends[0], self._range[0]), torch.maximum(ends[1], self._range[1])])
        self._range, self._classes = ends, classes

    def _convert(self, labels: Tensor, classes: int | None, model: Any) -> Tensor:
        is_row = labels.ndim == 2 and labels.shape[1] == classes
        if has_several_labels(model):
            return labels if labels.is_floating_point() else labels.float()
        if labels.ndim == 2 and labels.is_floating_point() and classes is not None and not is_row:
            raise InputError(
                f"The labels are rows of {labels.shape[1]} values, and the model has {classes} classes. Give one "
                "value for each class, or the index of the class."
            )
        if is_row and (labels.is_floating_point() or bool((labels <= 1).all() and (labels >= 0).all())):
            labels = labels if labels.is_floating_point() else labels.float()
            self._compare_sums(labels)
            return labels
        if labels.ndim == 1 and labels.is_floating_point() and classes != 1:
            # The default collator makes floats of NumPy's integers.
            if bool((labels != labels.round()).any()):
                raise InputError(
                    f"The labels are fractions, such as {labels[labels != labels.round()][0]:g}. Give the index of "
                    "the class, or a row with the share of each class."
                )
            return labels.long()
        return labels if labels.is_floating_point() or labels.dtype == torch.int64 else labels.long()

    @torch.no_grad()
    def _compare_sums(self, rows: Tensor) -> None:
        deviation = (rows.float().sum(1) - 1).abs().max()
        self._worst = deviation if self._worst is None else torch.maximum(self._worst, deviation)

    def verify(self) -> None:
        """Make sure that all rows since the last call sum to 1, and that all indices are classes."""
        worst, self._worst, ends, self._range = self._worst, None, self._range, None
        if ends is not None:
            for label in ends.tolist():
                check_range("The labels", label, self._classes)
        if worst is not None and not float(worst) <= SHARE_TOLERANCE:
            raise InputError(
                f"The labels are rows whose sum differs from 1 by up to {float(worst):.3g}, and the model has one "
                "label an image. Give shares of classes that sum to 1; or, for several labels an image, set "
                'model.config.problem_type = "multi_label_classification".'
            )


def check_range(what: str, label: int, classes: int) -> None:
    """Make sure that a label is the index of a class.

    Raises:
        InputError: it is none; the message begins with `what`.
    """
    if label >= classes:
        raise InputError(
            f"{what} go up to {label}, and the model has {classes} classes (0 to {classes - 1}). Type "
            f"apply_entame(model, num_labels={label + 1}), or correct the labels."
        )
    if label < 0:
        raise InputError(
            f"{what} have {label}, and classes are counted from 0 to {classes - 1}. Give {IGNORED_LABEL} to examples "
            "that should not count, and an index of a class to all others."
        )


def named_datasets(trainer: Any) -> dict[str, Any]:
    """Give the datasets that a trainer has, by the names that messages call them."""
    evaluated = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"eval": trainer.eval_dataset}
    named = {"train": trainer.train_dataset, **evaluated}
    return {name: dataset for name, dataset in named.items() if dataset is not None}


def check_labels(trainer: Any) -> None:
    """Make sure that the model has a class for each label of its datasets, as far as [`known_labels`] tells them.

    Transforms may change what a dataset lists, such as torchvision's `target_transform`: the example with the lowest
    or highest label is read. [`LabelReader`] compares the labels of other datasets, batch by batch.
    """
    # A search builds its models trial by trial.
    if trainer.model is None or not has_one_label(trainer.model):
        return
    _check_classes(trainer)
    classes, has_own_loss = num_classes(trainer.heads()[0].module), trainer.compute_loss_func is not None
    for name, dataset in named_datasets(trainer).items():
        labels = known_labels(dataset)
        if labels is None or not len(labels):
            continue
        what, counted = f"The labels of the {name} dataset", labels >= 0 if has_own_loss else labels != IGNORED_LABEL
        if not counted.any() and name == "train" and not has_own_loss:
            raise InputError(f"{what} are all {IGNORED_LABEL}, which counts nowhere. Give the index of a class.")
        rows = np.flatnonzero(counted)
        for row in {rows[labels[rows].argmin()], rows[labels[rows].argmax()]} if len(rows) else ():
            if not 0 <= labels[row] < classes:
                check_range(what, _label_of(trainer, dataset, int(row), int(labels[row])), classes)


def _check_classes(trainer: Any) -> None:
    """Make sure that the model has no class that the training dataset lacks, and its classes in the same order."""
    dataset, model = trainer.train_dataset, base_model(trainer.model)
    names, classes = known_classes(dataset) or [], num_classes(trainer.heads()[0].module)
    known = class_names(model.config) if isinstance(model, PreTrainedModel) else names
    if not names or (known == names and classes == len(names)) or not _trains_on_listed(trainer, dataset):
        return
    if classes > len(names):
        raise InputError(
            f"The model has {classes:,} classes, and the train dataset {len(names):,} ({shorten(', '.join(names), 80)}"
            f"). Load it with from_pretrained(..., num_labels={len(names)}, ignore_mismatched_sizes=True), or type "
            f"apply_entame(model, num_labels={len(names)})."
        )
    if known != names and sorted(known) == sorted(names):
        index = next(i for i, (a, b) in enumerate(zip(known, names, strict=True)) if a != b)
        raise InputError(
            f"The model and the train dataset order their classes otherwise: {index} is {printable(known[index])} in "
            f"the model, and {printable(names[index])} in the dataset. Set model.config.id2label = {{0: "
            f"{printable(names[0])!r}, ...}}."
        )
    unnamed = known[0].startswith("LABEL_") or names == [str(index) for index in range(len(names))]
    if len(known) == len(names) and known != names and not unnamed:
        logger.warning(
            f"The model calls its classes {shorten(', '.join(known), 80)}, and the train dataset "
            f"{shorten(', '.join(names), 80)}: predictions will have the model's names. Set model.config.id2label."
        )


def _trains_on_listed(trainer: Any, dataset: Any) -> bool:
    """Tell whether batches have the labels that a dataset lists, and not those of a transform or of another column."""
    if isinstance(dataset, BatchDataset):
        return True
    labels = known_labels(dataset)
    if labels is None or not len(labels):
        return False
    row = int(labels.argmax())
    return _label_of(trainer, dataset, row, int(labels[row])) == labels[row] > 0


def _label_of(trainer: Any, dataset: Any, row: int, listed: int) -> int:
    """Read an example's label as a batch would have it, if that is one index."""
    if isinstance(dataset, BatchDataset):
        return listed
    try:
        return int(trainer.data_collator([dataset[row]])["labels"])
    # What cannot be collated is explained in the first step.
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return 0


def has_several_labels(model: Any) -> bool:
    """Tell whether a model's images have several labels each: only its `config.problem_type` can say so."""
    return _problem_type(base_model(model)) == "multi_label_classification"


def has_one_label(model: Any) -> bool:
    """Tell whether a model's images have one class each: as its `config.problem_type` says, or does not say."""
    return _problem_type(base_model(model)) in (None, "single_label_classification")


def are_shares(labels: Any, model: Any) -> bool:
    """Tell whether labels are shares of classes, one row an example, and neither several labels each nor numbers."""
    rows = isinstance(labels, Tensor) and labels.is_floating_point() and labels.ndim == 2
    return rows and has_one_label(model)


def are_classes(labels: Any, model: Any) -> bool:
    """Tell whether labels are one class an example, and the model one whose loss for them is cross-entropy.

    transformers' models are, unless they were given a loss function; a forward of somebody else's may compute another
    loss.
    """
    base = base_model(model)
    own = type(base).forward.__module__.startswith("transformers.")
    known = own and base.loss_function is ForSequenceClassificationLoss
    indices = isinstance(labels, Tensor) and not labels.is_floating_point() and labels.ndim == 1
    return known and indices and has_one_label(base)


def _problem_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "problem_type", None)
