import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from transformers import EvalPrediction

from entame_hf import InputError
from entame_hf.metrics import (
    class_scores,
    classification_metric,
    confident_errors,
    metrics_of_predictions,
    predicted_classes,
)


def test_against_the_definitions():
    predictions, references = [0, 0, 1, 1, 2], [0, 1, 1, 1, 0]
    result = classification_metric().compute(predictions=predictions, references=references)
    # Class 0: precision 1/2, recall 1/2; class 1: 1, 2/3; class 2: never right.
    assert result["accuracy"] == pytest.approx(3 / 5)
    assert result["accuracy_macro"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert result["f1_macro"] == pytest.approx((0.5 + 0.8 + 0) / 3)


LOGITS = np.array([[0.1, 0.9], [2.0, -1.0], [0.0, 3.0]])


@pytest.mark.parametrize("form", ["logits", "reduced", "classes"])
def test_metrics_of_every_form_of_predictions(form):
    reduced = tuple(values.numpy() for values in predicted_classes(torch.tensor(LOGITS), None))
    predictions = {"logits": LOGITS, "reduced": reduced, "classes": LOGITS.argmax(-1)}[form]
    prediction = EvalPrediction(predictions=predictions, label_ids=np.array([1, -100, 0]))
    assert metrics_of_predictions()(prediction)["accuracy"] == 0.5


@pytest.mark.parametrize(
    "rows", [[[0, 1], [1, 0], [1, 0]], [[0.1, 0.9], [0.6, 0.4], [0.7, 0.3]]], ids=["one-hot", "shares"]
)
def test_the_largest_share_of_a_row_is_the_label(rows):
    metrics = metrics_of_predictions()
    found = metrics(EvalPrediction(predictions=LOGITS, label_ids=np.array(rows)))
    assert found == metrics(EvalPrediction(predictions=LOGITS, label_ids=np.array([1, 0, 0])))


@pytest.mark.parametrize("labels", [np.array([[1, 1], [0, 1], [0, 0]]), (np.zeros(3), np.zeros(3)), None, np.zeros(2)])
def test_other_labels_are_refused(labels):
    with pytest.raises(InputError, match="no class an image"):
        metrics_of_predictions()(EvalPrediction(predictions=LOGITS, label_ids=labels))


def test_metrics_of_no_label_are_nan():
    metrics = metrics_of_predictions()(EvalPrediction(predictions=LOGITS, label_ids=np.full(3, -100)))
    assert set(metrics) == {"accuracy", "accuracy_macro", "f1_macro"}
    assert np.isnan(list(metrics.values())).all()


def test_the_metrics_of_a_trainer_need_no_cache_folder(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("read-only")

    monkeypatch.setattr("os.makedirs", refuse)
    with pytest.raises(PermissionError):
        classification_metric()
    assert metrics_of_predictions()(EvalPrediction(LOGITS, np.array([1, 0, 0])))["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("more", [(), (None,), (torch.ones(3, 5),)], ids=["alone", "none", "features"])
def test_logits_that_come_with_other_outputs(more):
    logits = torch.tensor(LOGITS)
    classes, confidence = predicted_classes((logits, *more) if more else logits, None)
    assert classes.tolist() == [1, 0, 1]
    torch.testing.assert_close(confidence, logits.float().softmax(-1).amax(-1))


@pytest.mark.parametrize("reduced", [False, True], ids=["logits", "reduced"])
def test_confident_errors_are_sorted_and_have_labels(reduced):
    logits = np.array([[9.0, 0.0], [0.0, 1.0], [0.0, 5.0], [7.0, 0.0], [0.0, 8.0], [1e3, -1e3]], dtype=np.float32)
    labels = np.array([0, 0, 0, 1, -100, 1])
    predictions = logits
    if reduced:
        predictions = tuple(values.numpy() for values in predicted_classes(torch.tensor(logits), None))
    errors = confident_errors(predictions, labels, count=3)
    assert errors.indices.tolist() == [5, 3, 2]
    assert errors.predicted.tolist() == [0, 0, 1]
    assert errors.true.tolist() == [1, 1, 0]
    np.testing.assert_allclose(errors.confidence, 1 / (1 + np.exp([-2e3, -7, -5])), rtol=1e-6)
    assert confident_errors(logits.argmax(-1), labels) is None


def test_scores_of_classes_are_scikit_learns():
    generator = np.random.default_rng(0)
    # Class 4 has no example and class 5 is never predicted.
    true, predicted = generator.choice([0, 1, 2, 3, 5], 300), generator.integers(0, 5, 300)
    expected = precision_recall_fscore_support(true, predicted, labels=range(6), zero_division=0)
    scores = class_scores(confusion_matrix(true, predicted, labels=range(6)))
    np.testing.assert_allclose(np.stack(scores), np.stack(expected))
