"""A training whose losses or weights are no numbers stops, and nothing of it is saved."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from conftest import RandomImages
from test_lifecycle import trainer
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError, NonFiniteError

pytestmark = pytest.mark.runs


class AtStep(TrainerCallback):
    """Do something to the model after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(kwargs["model"])


def set_nan(model):
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))


def set_infinite_statistics(model):
    next(buffer for name, buffer in model.named_buffers() if "running_var" in name).fill_(float("inf"))


@pytest.mark.parametrize("act", [set_nan, set_infinite_statistics])
@pytest.mark.parametrize("logging", [{"logging_steps": 1}, {"logging_strategy": "no"}], ids=["logged", "not logged"])
def test_a_training_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path, act, logging):
    with pytest.raises(NonFiniteError, match=rf"after step [34].*learning_rate=0\.0001.*{tmp_path}/checkpoint-2"):
        trainer(tmp_path, [AtStep(3, act)], max_steps=6, **logging).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (tmp_path / "model.safetensors").exists()


def test_a_loss_that_is_not_finite_stops_with_trainers_filter_too(tmp_path):
    done = trainer(tmp_path, [AtStep(3, set_nan)], logging_nan_inf_filter=True, save_strategy="no", max_steps=6)
    with pytest.raises(NonFiniteError, match=r"after step [34]"):
        done.train()


@pytest.mark.parametrize("overflows", [{2}, {1}, {1, 2}], ids=str)
def test_steps_that_loss_scaling_skips_leave_later_losses_finite(tmp_path, overflows):
    """float16 overflows in some forwards: their losses are not logged, and the training continues."""

    class Overflowing(EntameTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * torch.inf if self.state.global_step + 1 in overflows else loss

        def create_optimizer(self, *args):
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            return super().create_optimizer(*args)

    done = trainer(tmp_path, kind=Overflowing, max_grad_norm=0.0)
    train_loss = done.train().training_loss
    losses = {entry["step"]: entry["loss"] for entry in done.state.log_history if "loss" in entry}
    assert {step for step, loss in losses.items() if math.isnan(loss)} == overflows
    assert math.isfinite(train_loss)
    averaged = trainer(tmp_path / "two", kind=Overflowing, max_grad_norm=0.0, logging_steps=4)
    averaged.train()
    (mean,) = [entry["loss"] for entry in averaged.state.log_history if "loss" in entry]
    assert mean == pytest.approx(sum(losses[step] for step in losses.keys() - overflows) / (4 - len(overflows)))


def test_a_loss_scale_that_has_vanished_stops_the_training(tmp_path):
    done = trainer(tmp_path, save_strategy="no")
    done.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-20)
    with pytest.raises(NonFiniteError, match="training loss is nan after step 1"):
        done.train()


@pytest.mark.parametrize("act", [set_nan, set_infinite_statistics])
def test_a_model_that_is_not_finite_is_refused_before_the_first_step(tmp_path, act):
    done = trainer(tmp_path)
    act(done.model)
    with pytest.raises(InputError, match="not finite before any training"):
        done.train()


def test_fp16_on_a_cpu_is_said_to_have_no_effect(tmp_path, caplog):
    trainer(tmp_path, fp16=True)
    assert "`fp16=True` has no effect on a CPU" in caplog.text


class Ignored(Dataset):
    """Labels that count nowhere, which nobody knows before an example is read."""

    def __init__(self, first=0):
        self.first, self.images = first, RandomImages(64).images

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": index % 10 if index < self.first else -100}


@pytest.mark.parametrize("kind", [EntameTrainingArguments, TrainingArguments], ids=["ours", "plain"])
@pytest.mark.parametrize("logging", [1, 500], ids=["logged", "not logged"])
def test_a_training_without_a_label_that_counts_stops(tmp_path, kind, logging):
    """Plain arguments filter losses that are no numbers, and Trainer would log 0."""
    options = {"max_steps": 2, "logging_steps": logging, "save_strategy": "no", "report_to": "none", "use_cpu": True}
    model = timm.create_model("test_resnet", num_classes=10)
    done = EntameTrainer(model, kind(str(tmp_path), disable_tqdm=True, **options), train_dataset=Ignored())
    with pytest.raises(NonFiniteError, match=r"training loss is nan after step [12].*labels are all -100"):
        done.train()
    assert done.state.global_step == min(logging, 2)


def test_labels_that_are_known_to_count_nowhere_are_refused_before_the_first_step(tmp_path):
    done = trainer(tmp_path)
    done.train_dataset.labels[:] = -100
    with pytest.raises(InputError, match="labels of the train dataset are all -100"):
        done.train()


@pytest.mark.parametrize("factor", [math.inf, math.nan], ids=str)
def test_a_loss_that_is_not_finite_after_the_last_logging_step_stops(tmp_path, factor):
    class Last(EntameTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            return loss * factor if self.state.global_step == 3 else loss

    with pytest.raises(NonFiniteError, match=rf"loss is {factor} after step 4.*{tmp_path}/checkpoint-4"):
        trainer(tmp_path, kind=Last, logging_steps=3).train()


@pytest.mark.parametrize(
    ("sets", "name"),
    [(Ignored(), "eval_loss"), ({"first": RandomImages(16), "second": Ignored()}, "eval_second_loss")],
    ids=["one set", "several sets"],
)
def test_an_evaluation_loss_that_is_not_finite_stops(tmp_path, sets, name):
    done = trainer(tmp_path, eval_strategy="steps", eval_steps=3, logging_strategy="no")
    done.eval_dataset = sets
    with pytest.raises(NonFiniteError, match=rf"{name} is nan after step 3.*{tmp_path}/checkpoint-2"):
        done.train()


def test_other_metrics_and_evaluations_outside_of_a_training_may_be_no_numbers(tmp_path):
    done = trainer(tmp_path, eval_strategy="steps", eval_steps=1, max_steps=1)
    done.compute_metrics = lambda _: {"auc": math.nan, "my_loss": math.inf}
    done.train()
    assert math.isnan(done.evaluate(Ignored())["eval_loss"])


def test_a_batch_in_which_some_labels_count_is_trained_on(tmp_path):
    done = trainer(tmp_path, per_device_train_batch_size=64, max_steps=1)
    done.train_dataset = Ignored(first=20)
    assert done.train().training_loss == pytest.approx(math.log(10), abs=1e-2)


def test_a_filter_that_was_asked_for_leaves_losses_out_of_both_means(tmp_path):
    class Odd(EntameTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * math.nan if self.state.global_step == 1 else loss

    done = trainer(tmp_path, kind=Odd, logging_nan_inf_filter=True, max_steps=2, logging_steps=2, max_grad_norm=0)
    done.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    metrics = done.train().metrics
    logged = next(entry["loss"] for entry in done.state.log_history if "loss" in entry)
    assert logged == metrics["train_loss"] == pytest.approx(math.log(10), abs=1e-2)
