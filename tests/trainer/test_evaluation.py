"""Evaluations of one process are Trainer's, but for a loss that is a mean over labels that count."""

import json
import math

import numpy as np
import pytest
import torch
from conftest import RandomImages
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

from entame_hf import EntameTrainer, InputError
from entame_hf.metrics import metrics_of_predictions


class Extra(torch.nn.Module):
    """A classifier that is given more than images and labels."""

    main_input_name = "pixel_values"

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3 * 32 * 32, 10)

    def forward(self, pixel_values, labels, extra=None):
        logits = self.head(pixel_values.flatten(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def arguments(folder, **options):
    return TrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, **options)


@pytest.mark.parametrize(
    "extra", [["a", "b"], torch.tensor(0.5), torch.zeros(5, 2)], ids=["strings", "one-number", "other-rows"]
)
def test_inputs_need_not_have_a_row_an_example(tmp_path, extra):
    """Whatever comes first."""
    model, measured = Extra(), []

    def measure(prediction):
        measured.append(prediction)
        return {}

    losses = []
    for kind in (Trainer, EntameTrainer):
        trainer = kind(
            model,
            arguments(tmp_path, per_device_eval_batch_size=8, include_for_metrics=["inputs", "loss"]),
            data_collator=lambda items: {"extra": extra, **default_collate(items)},
            compute_metrics=measure,
        )
        losses.append(trainer.evaluate(RandomImages(22))["eval_loss"])
    assert losses[1] == pytest.approx(losses[0])
    expected, given = measured
    for name in ("predictions", "label_ids", "inputs", "losses"):
        np.testing.assert_allclose(getattr(given, name), getattr(expected, name), rtol=1e-6)


def test_metrics_may_evaluate_themselves(tmp_path, tiny_vit):
    data = RandomImages(22)
    data.labels[:5] = -100
    trainer = EntameTrainer(tiny_vit, arguments(tmp_path, per_device_eval_batch_size=4))
    expected = trainer.evaluate(data)["eval_loss"]

    def measure(prediction):
        trainer.compute_metrics = None
        return trainer.evaluate(RandomImages(8, seed=1), metric_key_prefix="other")

    trainer.compute_metrics = measure
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("left_out", [True, False])
@pytest.mark.parametrize("ignored", [0, 5])
def test_losses_that_are_no_numbers_are_left_out_where_trainer_does_so(tmp_path, tiny_vit, left_out, ignored):
    data = RandomImages(24)
    data.labels[:ignored] = -100
    data.images[-1] = math.inf
    args = arguments(tmp_path, per_device_eval_batch_size=8, logging_nan_inf_filter=left_out)
    loss = EntameTrainer(tiny_vit, args).evaluate(data)["eval_loss"]
    expected = tiny_vit(data.images[:16], labels=data.labels[:16]).loss.item()
    assert loss == pytest.approx(expected if left_out else math.nan, rel=1e-5, nan_ok=True)


def test_metrics_of_numpy_and_torch_are_logged_and_saved(tiny_vit, tmp_path):
    values = {
        "matrix": np.eye(2), "number": np.float32(0.5), "count": np.int64(3), "row": torch.tensor([1, 2]),
        "scalar": torch.tensor(0.25), "nested": {"classes": np.array([0.5])}, "list": [np.float64(1)],
    }  # fmt: skip
    args = arguments(tmp_path, max_steps=1, eval_strategy="steps")
    args.eval_steps = 1
    trainer = EntameTrainer(
        tiny_vit, args, train_dataset=RandomImages(8), eval_dataset=RandomImages(8), compute_metrics=lambda _: values
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.log({"mine": np.arange(2)})
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    saved = json.loads((tmp_path / "eval_results.json").read_text())
    expected = {"matrix": [[1, 0], [0, 1]], "number": 0.5, "count": 3, "row": [1, 2], "scalar": 0.25}
    expected |= {"nested": {"classes": [0.5]}, "list": [1]}
    assert {name: saved[f"eval_{name}"] for name in expected} == expected
    assert json.loads((tmp_path / "trainer_state.json").read_text())["log_history"][-1]["mine"] == [0, 1]


def own_metrics(prediction):
    return {"score": 1.0}


OURS = metrics_of_predictions()


@pytest.mark.parametrize(
    ("metric", "sets", "compute", "message"),
    [
        (None, ("a", "b"), OURS, "a_loss, a_accuracy, .*b_loss"),
        ("accuracy", ("a", "b"), OURS, "`metric_for_best_model=accuracy` .*a_accuracy"),
        ("a_score", ("a", "b"), OURS, "a_loss, a_accuracy"),
        ("score", ("a", "b"), own_metrics, r"a_loss, a_\.\.\., b_loss"),
        ("accuracy", (), None, "Use one of loss, or give `compute_metrics`"),
        ("f1", (), OURS, "loss, accuracy, accuracy_macro, f1_macro: `metric_for_best_model=loss`"),
        ("a_loss", (), None, "loss"),
    ],
)
def test_a_best_metric_that_is_not_measured_is_refused_before_training(
    tmp_path, tiny_vit, metric, sets, compute, message
):
    with pytest.raises(InputError, match=message):
        best_of(tmp_path, tiny_vit, metric, sets, compute).train()
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("metric", "sets", "compute"),
    [
        (None, (), None),
        ("eval_accuracy", (), OURS),
        ("score", (), own_metrics),
        ("b_loss", ("a", "b"), None),
        ("eval_b_score", ("a", "b"), own_metrics),
    ],
)
def test_a_best_metric_that_is_measured_chooses_the_checkpoint(tmp_path, tiny_vit, metric, sets, compute):
    trainer = best_of(tmp_path, tiny_vit, metric, sets, compute)
    trainer.train()
    assert trainer.state.best_metric is not None


def test_metrics_that_would_get_single_batches_are_refused_before_training(tmp_path, tiny_vit):
    args = arguments(tmp_path, eval_do_concat_batches=False)
    with pytest.raises(InputError, match="`eval_do_concat_batches=False` leaves predictions in batches"):
        EntameTrainer(tiny_vit, args, train_dataset=RandomImages(16), compute_metrics=OURS).train()


def best_of(folder, model, metric, sets, compute):
    steps = {"max_steps": 2, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    args = arguments(folder, load_best_model_at_end=True, metric_for_best_model=metric, **steps)
    held_out = {name: RandomImages(8, seed=seed) for seed, name in enumerate(sets)} or RandomImages(8)
    return EntameTrainer(model, args, train_dataset=RandomImages(16), eval_dataset=held_out, compute_metrics=compute)
