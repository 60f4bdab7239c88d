"""Metrics in `evaluate`'s form that need no network: `evaluate.load` fetches its scripts from the Hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import accuracy_score, f1_score, precision_recall_fscore_support, recall_score
from transformers import EvalPrediction

from .errors import InputError

Metrics = Callable[[EvalPrediction], dict[str, float]]

# What [`metrics_of_predictions`] measures.
MEASURED = ("accuracy", "accuracy_macro", "f1_macro")

# How far the sum of a row of shares of classes may be from 1: bfloat16 keeps three digits.
SHARE_TOLERANCE = 0.01


def classification_metric() -> Any:
    """Build an `evaluate.Metric` of accuracy over examples (micro) and of accuracy and F1 over classes (macro).

    Returns:
        `evaluate.Metric`: its `compute(predictions=..., references=...)` takes class indices and returns
        `{"accuracy": ..., "accuracy_macro": ..., "f1_macro": ...}`, all in [0, 1].

    Example:

    ```python
    >>> from entame_hf.metrics import classification_metric

    >>> classification_metric().compute(predictions=[0, 1, 1], references=[0, 1, 0])["accuracy"]
    0.6666666666666666
    ```
    """
    # Imported here: it would double what importing this package adds to importing Trainer.
    import evaluate
    from datasets import Features, Value

    class ClassificationMetric(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(
                description="Accuracy over examples, and accuracy and F1 averaged over classes.",
                citation="",
                features=Features({"predictions": Value("int64"), "references": Value("int64")}),
            )

        def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
            return _scores(predictions, references)

    return ClassificationMetric()


def _scores(predictions: Any, references: Any) -> dict[str, float]:
    if not len(references):
        return dict.fromkeys(MEASURED, np.nan)
    present = np.unique(references)
    return {
        # Over examples: precision, recall and F1 averaged so are this number too.
        "accuracy": float(accuracy_score(references, predictions)),
        "accuracy_macro": float(recall_score(references, predictions, labels=present, average="macro")),
        "f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0.0)),
    }


def metrics_of_predictions() -> Metrics:
    """Build `compute_metrics` for a trainer: see [`classification_metric`].

    It takes logits, what [`predicted_classes`] made of them, or class indices. Of labels that are rows of shares, the
    largest counts. Labels of -100 are left out; if there are no others, the metrics are NaN.

    Example:

    ```python
    >>> from entame_hf import EntameTrainer
    >>> from entame_hf.metrics import metrics_of_predictions

    >>> EntameTrainer(model, args, compute_metrics=metrics_of_predictions())  # doctest: +SKIP
    ```
    """

    return _measure


# An `evaluate.Metric` needs a cache folder that it can write to.
def _measure(prediction: EvalPrediction) -> dict[str, float]:
    classes, _ = classes_and_confidence(prediction.predictions)
    labels = label_indices(prediction.label_ids)
    if labels is None or labels.shape != classes.shape:
        raise InputError(
            "The labels are no class an image, which these metrics are about. Give a `compute_metrics` of your own."
        )
    counted = labels != IGNORED_LABEL
    return _scores(classes[counted], labels[counted])


def label_indices(labels: Any) -> np.ndarray | None:
    """Get N class indices from labels: of rows of shares the largest; None for other rows, such as several labels."""
    if not isinstance(labels, np.ndarray):
        return None
    if labels.ndim == 2 and labels.shape[1] > 1 and np.allclose(labels.sum(axis=1), 1, rtol=0, atol=SHARE_TOLERANCE):
        return labels.argmax(axis=1)
    return labels if labels.ndim == 1 else None


def measured_names(compute_metrics: Any) -> tuple[str, ...] | None:
    """List what an evaluation with a function for its metrics measures; None if only the function knows."""
    if compute_metrics is None:
        return ("loss",)
    return ("loss", *MEASURED) if compute_metrics is _measure else None


def predicted_classes(logits: Any, labels: Any) -> tuple[Any, Any]:
    """Reduce logits to classes and their probabilities, for `preprocess_logits_for_metrics`.

    Evaluation then keeps two numbers an example instead of C.

    Args:
        logits (`torch.Tensor` of shape `(N, C)`, or a tuple that begins with it): the model's output.
        labels: not used.

    Returns:
        `tuple`: N class indices, and the N probabilities of these classes.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    confidence, classes = logits.float().softmax(dim=-1).max(dim=-1)
    return classes, confidence


def classes_and_confidence(predictions: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Get N class indices and, where they are known, their N probabilities from the predictions of an evaluation."""
    first, *others = predictions if isinstance(predictions, tuple) else (predictions,)
    first = np.asarray(first)
    if first.ndim == 2 and first.dtype.kind == "f":
        if (first >= 0).all() and np.allclose(first.sum(axis=-1), 1, atol=SHARE_TOLERANCE):
            # Probabilities already, as logits are not.
            return first.argmax(axis=-1), first.max(axis=-1)
        # The largest term of a softmax.
        return first.argmax(axis=-1), 1 / np.exp(first - first.max(axis=-1, keepdims=True)).sum(axis=-1)
    confidence = np.asarray(others[0]) if others else None
    return first, confidence if confidence is not None and confidence.shape == first.shape else None


class ConfidentErrors(NamedTuple):
    """Hold the k errors that a model is most confident of, the most confident first.

    `indices` are rows of the dataset that was evaluated; `confidence` is the probability of the predicted class.
    """

    indices: np.ndarray
    predicted: np.ndarray
    true: np.ndarray
    confidence: np.ndarray


def confident_errors(predictions: Any, labels: np.ndarray, count: int = 16) -> ConfidentErrors | None:
    """Find the errors that a model is most confident of: wrong labels are among them.

    Args:
        predictions (`numpy.ndarray` of shape `(N, C)` or `tuple`): logits, or what [`predicted_classes`] made of them.
        labels (`numpy.ndarray` of shape `(N,)`): class indices; negative ones are left out.
        count (`int`, *optional*, defaults to 16): the number of errors at most.

    Returns:
        [`ConfidentErrors`] or `None`: None where the probabilities are not known.
    """
    classes, confidence = classes_and_confidence(predictions)
    if confidence is None:
        return None
    wrong = np.flatnonzero((classes != labels) & (labels >= 0) & np.isfinite(confidence))
    indices = wrong[np.argsort(-confidence[wrong], kind="stable")[:count]]
    return ConfidentErrors(indices, classes[indices], labels[indices], confidence[indices])


# Cross-entropy leaves this label out, in torch and in transformers.
IGNORED_LABEL = -100

PREFIX = "eval_"

# Trainer measures these of the machine, not of the model.
_OF_THE_MACHINE = ("_runtime", "_per_second", "_time", "_delta")


def evaluation_metrics(entry: Mapping[str, Any], prefix: str = PREFIX) -> dict[str, float]:
    """Get what an evaluation measured of the model, from one entry of `trainer.state.log_history`.

    Plain numbers without the prefix, such as `{"loss": 0.3, "accuracy": 0.9}`; empty for an entry of another
    kind. Metrics that are no single number are left out.
    """
    numbers = {}
    for key, value in entry.items():
        # A scalar of numpy or torch is neither JSON nor YAML.
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and key.startswith(prefix) and not key.endswith(_OF_THE_MACHINE):
            numbers[key.removeprefix(prefix)] = value
    return numbers


class Evaluation(NamedTuple):
    """Hold what is known of the weights that a model holds, after the optimizer step `step`.

    `confusion` (M, M) counts examples, true classes by predicted ones, up to the last class that was seen: M ≤ C.
    `split` is that of the images, where it is known; `test` are the metrics of test images, which chose nothing.
    """

    metrics: dict[str, float]
    step: int | None = None
    confusion: np.ndarray | None = None
    errors: ConfidentErrors | None = None
    split: str | None = None
    test: dict[str, float] = {}  # noqa: RUF012


class ClassScores(NamedTuple):
    """Hold the precision, the recall, their harmonic mean F1 and the number of examples of every class, by index."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray


def class_scores(confusion: np.ndarray) -> ClassScores:
    """Compute the scores of every class from counts of examples (C, C), true classes by predicted ones; 0/0 is 0."""
    true, predicted = confusion.nonzero()
    counts, labels = confusion[true, predicted], range(len(confusion))
    precision, recall, f1, _ = precision_recall_fscore_support(
        true, predicted, labels=labels, sample_weight=counts, zero_division=0
    )
    return ClassScores(precision, recall, f1, confusion.sum(axis=1))
