"""Kinds of faults in the life of a run: damaged checkpoints, weights that are no numbers, two runs in one folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time

import pytest
import timm
import torch
from conftest import RandomImages
from transformers import TrainerCallback

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError, NonFiniteError
from entame_hf.trainer.lock import locked_output_dir
from entame_hf.trainer.resume import damage, last_intact_checkpoint


def trainer(folder, callbacks=None, kind=EntameTrainer, **changes):
    torch.manual_seed(0)
    defaults = {
        **{"max_steps": 4, "save_steps": 2, "logging_steps": 1, "energy_logging_steps": 0, "learning_rate": 1e-3},
        **{"per_device_train_batch_size": 16, "use_cpu": True, "disable_tqdm": True, "report_to": "none"},
    }
    args = EntameTrainingArguments(str(folder), **{**defaults, **changes})
    model = timm.create_model("test_resnet", num_classes=10)
    data = RandomImages(64)
    return kind(model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer(folder).train()
    return folder


class AtStep(TrainerCallback):
    """Do something to the model after a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act(kwargs["model"])


# ---- A checkpoint that lacks a file, or has another one ----


def parts(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "entame_head.safetensors", "config.json"} <= names
    return sorted(names - {"checkpoint_files.json"})


def test_every_file_of_a_checkpoint_is_needed_to_resume(tmp_path, run):
    for name in parts(run / "checkpoint-4"):
        shutil.copytree(run, tmp_path / name)
        (tmp_path / name / "checkpoint-4" / name).unlink()
        assert name in damage(tmp_path / name / "checkpoint-4")
        assert last_intact_checkpoint(tmp_path / name) == str(tmp_path / name / "checkpoint-2")


def test_a_flipped_byte_is_found_in_every_file_of_a_checkpoint(tmp_path, run):
    for name in parts(run / "checkpoint-4"):
        shutil.copytree(run / "checkpoint-4", tmp_path / name)
        file = tmp_path / name / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        assert name in damage(tmp_path / name)


def test_a_named_checkpoint_that_is_damaged_is_refused_in_one_line(tmp_path, run):
    shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "scheduler.pt").unlink()
    with pytest.raises(InputError, match=r"scheduler\.pt is missing"):
        trainer(tmp_path / "out").train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("null", "does not say after which step"),
        ("[1]", "does not say after which step"),
        ('{"global_step": "four"}', "does not say after which step"),
        ('{"global_step": 4, "key_of_tomorrow": 1}', "key_of_tomorrow"),
        ("", "is no JSON"),
        ('{"global_step": 4, "epoch": "two"}', "epoch in trainer_state.json has a value of another type"),
        ('{"global_step": 4, "log_history": null}', "log_history in trainer_state.json"),
        ('{"global_step": 4, "log_history": [1]}', "log_history in trainer_state.json"),
        ('{"global_step": 4, "max_steps": null}', "max_steps in trainer_state.json"),
        ('{"global_step": 4, "best_global_step": []}', "best_global_step in trainer_state.json"),
        ('{"global_step": 4, "stateful_callbacks": 3}', "stateful_callbacks in trainer_state.json"),
    ],
)
def test_an_odd_trainer_state_is_named(tmp_path, run, state, reason):
    shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text(state)
    assert reason in damage(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("listed", ["null", "[]", "{"])
def test_an_odd_list_of_files_is_named(tmp_path, run, listed):
    shutil.copytree(run / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "checkpoint_files.json").write_text(listed)
    assert "cannot be read" in damage(tmp_path / "checkpoint-4")


def test_a_checkpoint_of_the_model_alone_is_not_resumed(tmp_path):
    trainer(tmp_path, save_only_model=True).train()
    with pytest.raises(InputError, match="save_only_model"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    with pytest.raises(InputError, match="there is no checkpoint there"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_says_nothing_of_this_machine_and_holds_no_token(tmp_path):
    trainer(tmp_path, hub_token="hf_SecretSecretSecret", load_best_model_at_end=True, eval_strategy="steps").train()
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert b"hf_Secret" not in file.read_bytes()
            assert str(tmp_path).encode() not in file.read_bytes() or file.name == ".run.lock", file


# ---- Rotation ----


@pytest.mark.parametrize("hours", [-2, 2, 0])
def test_checkpoints_are_rotated_by_step_under_any_clock(tmp_path, hours):
    past = time.time() - 3600 * hours
    for step in (2, 4):
        trainer(tmp_path, max_steps=step, save_total_limit=2).train(resume_from_checkpoint=step > 2)
        os.utime(tmp_path / f"checkpoint-{step}", (past + step, past + step))
    trainer(tmp_path, max_steps=8, save_total_limit=2).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]


def test_the_newest_and_the_best_checkpoint_stay(tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "metric_for_best_model": "eval_loss"}
    best_first = {"greater_is_better": True, "learning_rate": 1e-2}
    done = trainer(tmp_path, max_steps=8, save_total_limit=2, eval_steps=2, **options, **best_first)
    done.train()
    kept = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert kept == {"checkpoint-8", f"checkpoint-{done.state.best_global_step}"}


# ---- Numbers that are none ----


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


# ---- Evaluation in half precision ----


@pytest.mark.parametrize("precision", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_in_half_precision_leaves_the_weights_alone(tmp_path, precision):
    done = trainer(tmp_path, max_steps=2, **{precision: True})
    done.train()
    before = {name: tensor.clone() for name, tensor in done.model.state_dict().items()}
    done.evaluate()
    done.predict(RandomImages(8))
    torch.testing.assert_close(done.model.state_dict(), before, rtol=0, atol=0)
    done.save_model()
    saved = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert {tensor.dtype for tensor in saved.state_dict().values() if tensor.is_floating_point()} == {torch.float32}


# ---- Two runs in one folder ----


@pytest.mark.runs
def test_a_second_run_in_the_folder_is_refused_by_process_and_host(tmp_path):
    code = f"from entame_hf.trainer.lock import locked_output_dir\nwith locked_output_dir({str(tmp_path)!r}):\n"
    code += "    print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"in use by process {other.pid} on \S+"):
            trainer(tmp_path).train()
        assert not list(tmp_path.glob("checkpoint-*"))
        trainer(tmp_path, save_strategy="no", max_steps=1).train()
        other.kill()
    trainer(tmp_path, max_steps=2).train()


def test_a_run_may_train_in_the_folder_that_it_holds(tmp_path):
    with locked_output_dir(tmp_path):
        holder = json.loads((tmp_path / ".run.lock").read_text())
        assert holder["pid"] == os.getpid()
        trainer(tmp_path, max_steps=2).train()
        assert json.loads((tmp_path / ".run.lock").read_text()) == holder
    assert (tmp_path / ".run.lock").read_text() == ""
