"""Metrics in `evaluate`'s form that need no network: `evaluate.load` fetches its scripts from the Hub."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, f1_score, recall_score
from transformers import EvalPrediction

from .loss import IGNORED_LABEL

Metrics = Callable[[EvalPrediction], dict[str, float]]


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
            present = np.unique(references)
            return {
                # Over examples: precision, recall and F1 averaged so are this number too.
                "accuracy": float(accuracy_score(references, predictions)),
                "accuracy_macro": float(recall_score(references, predictions, labels=present, average="macro")),
                "f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0.0)),
            }

    return ClassificationMetric()


def metrics_of_predictions() -> Metrics:
    """Build `compute_metrics` for a trainer whose logits were reduced by [`predicted_classes`]."""
    metric = classification_metric()

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        counted = prediction.label_ids != IGNORED_LABEL
        return metric.compute(predictions=prediction.predictions[counted], references=prediction.label_ids[counted])

    return compute


def predicted_classes(logits: Any, labels: Any) -> Any:
    """Reduce logits to class indices, for `preprocess_logits_for_metrics`: evaluation keeps one number an example."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(dim=-1)
