import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from transformers import EvalPrediction

from entame_hf.metrics import class_scores, classification_metric, metrics_of_predictions, predicted_classes


def test_against_the_definitions():
    predictions, references = [0, 0, 1, 1, 2], [0, 1, 1, 1, 0]
    result = classification_metric().compute(predictions=predictions, references=references)
    # Class 0: precision 1/2, recall 1/2; class 1: 1, 2/3; class 2: never right.
    assert result["accuracy"] == pytest.approx(3 / 5)
    assert result["accuracy_macro"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert result["f1_macro"] == pytest.approx((0.5 + 0.8 + 0) / 3)


def test_in_a_trainers_place():
    logits = torch.tensor([[0.1, 0.9], [2.0, -1.0]])
    labels = np.array([1, 1])
    for given in (logits, (logits, None)):
        classes = predicted_classes(given, None)
        assert classes.tolist() == [1, 0]
        prediction = EvalPrediction(predictions=classes.numpy(), label_ids=labels)
        assert metrics_of_predictions()(prediction)["accuracy"] == 0.5


def test_ignored_labels_are_not_counted():
    prediction = EvalPrediction(predictions=np.array([0, 1, 1]), label_ids=np.array([0, -100, 0]))
    assert metrics_of_predictions()(prediction)["accuracy"] == 0.5


def test_scores_of_classes_are_scikit_learns():
    generator = np.random.default_rng(0)
    # Class 4 has no example and class 5 is never predicted.
    true, predicted = generator.choice([0, 1, 2, 3, 5], 300), generator.integers(0, 5, 300)
    expected = precision_recall_fscore_support(true, predicted, labels=range(6), zero_division=0)
    scores = class_scores(confusion_matrix(true, predicted, labels=range(6)))
    np.testing.assert_allclose(np.stack(scores), np.stack(expected))
