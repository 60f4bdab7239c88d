"""Checkpoints in the life of a run: damage, rotation, two runs in one folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import timm
import torch
from conftest import RandomImages

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.trainer import locked_output_dir
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


# ---- Rotation ----


@pytest.mark.runs
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


# ---- Two runs in one folder ----


@pytest.mark.runs
def test_a_second_run_in_the_folder_is_refused_by_process_and_host(tmp_path):
    code = f"from entame_hf.trainer import locked_output_dir\nwith locked_output_dir({str(tmp_path)!r}):\n"
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


@pytest.mark.runs
@pytest.mark.parametrize("name", ["link", "out/../out", "out/."])
def test_a_run_that_trains_in_its_folder_by_another_name_holds_it_still(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    code = f"from entame_hf.trainer import locked_output_dir\nwith locked_output_dir({str(tmp_path / 'out')!r}): pass"
    with locked_output_dir(tmp_path / "out"):
        trainer(tmp_path / name, max_steps=2).train()
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"in use by process {os.getpid()} on " in other.stderr
