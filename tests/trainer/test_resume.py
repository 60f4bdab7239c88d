"""A run that is killed at any moment resumes from its last intact checkpoint, and ends as if it had never stopped."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import transformers.modeling_utils
from conftest import RandomImages
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerState
from transformers.utils import logging

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError, RunError
from entame_hf.cli.output_folder import last_checkpoint
from entame_hf.trainer.resume import damage, last_intact_checkpoint

pytestmark = pytest.mark.runs

DATA = RandomImages(48)
HELD_OUT = RandomImages(30, seed=1)


def arguments(folder, **changes):
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 16,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "load_best_model_at_end": True,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return EntameTrainingArguments(str(folder), **{**defaults, **changes})


def train(folder, resume=None, callbacks=None, **changes):
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    trainer = EntameTrainer(
        model, arguments(folder, **changes), train_dataset=DATA, eval_dataset=HELD_OUT, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def in_a_fork(function):
    """Run a function in a copy of this process, and return its exit code."""
    return _exit_code("fork", function)


def in_a_process(function, *args, **kwargs):
    """Run a training in a process of its own, and return its exit code. A copy of one with threads may not train."""
    return _exit_code("spawn", _with_threads, function, torch.get_num_threads(), *args, **kwargs)


def _exit_code(method, function, *args, **kwargs):
    process = multiprocessing.get_context(method).Process(target=function, args=args, kwargs=kwargs)
    process.start()
    process.join()
    return process.exitcode


def _with_threads(function, count, *args, **kwargs):
    torch.set_num_threads(count)
    function(*args, **kwargs)


def train_until_killed(folder, checkpoint, name, **options):
    """Train, and get a SIGKILL when half of a checkpoint's file is written."""

    def deadly(write):
        def wrapper(*args, **kwargs):
            write(*args, **kwargs)
            for path in (Path(arg) for arg in args if isinstance(arg, str | Path)):
                if path.name == name and checkpoint in path.parts:
                    os.truncate(path, path.stat().st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)

        return wrapper

    for module in (transformers.modeling_utils, safetensors.torch):
        attribute = "safe_save_file" if module is transformers.modeling_utils else "save_file"
        setattr(module, attribute, deadly(getattr(module, attribute)))
    torch.save = deadly(torch.save)
    TrainerState.save_to_json = deadly(TrainerState.save_to_json)
    train(folder, **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupts, and where it was saved."""
    folder = tmp_path_factory.mktemp("whole")
    return train(folder), folder


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    return caplog


def same_ending(trainer, expected):
    torch.testing.assert_close(trainer.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0)
    assert trainer.evaluate()["eval_loss"] == expected.evaluate()["eval_loss"]
    assert Path(trainer.state.best_model_checkpoint).name == Path(expected.state.best_model_checkpoint).name


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_killed_while_a_checkpoint_is_written(tmp_path, whole, warnings, name):
    assert in_a_process(train_until_killed, tmp_path, "checkpoint-4", name, save_total_limit=1) == -signal.SIGKILL
    assert (tmp_path / "checkpoint-4").is_dir()
    args = arguments(tmp_path, resume_from_checkpoint="last")
    assert last_checkpoint(args) == str(tmp_path / "checkpoint-2")
    same_ending(train(tmp_path, resume=True), whole[0])
    assert f"Skipping {tmp_path / 'checkpoint-4'}, which cannot be resumed from" in warnings.text
    assert damage(tmp_path / "checkpoint-4") is None


@pytest.mark.parametrize("max_steps", [5, 6], ids=["within an epoch", "at its end"])
def test_killed_after_the_last_checkpoint(tmp_path, max_steps):
    finished = train(tmp_path, max_steps=max_steps)
    resumed = train(tmp_path, resume=True, max_steps=max_steps)
    assert resumed.state.global_step == max_steps
    same_ending(resumed, finished)


def test_killed_while_an_older_runs_checkpoint_is_written_over(tmp_path, whole):
    shutil.copytree(whole[1], tmp_path / "run")
    options = {"resume": str(tmp_path / "run" / "checkpoint-2")}
    in_a_process(train_until_killed, tmp_path / "run", "checkpoint-4", "optimizer.pt", **options)
    assert damage(tmp_path / "run" / "checkpoint-4") == "its writing never ended"


@pytest.mark.parametrize("name", ["model.safetensors", "entame_head.safetensors", "optimizer.pt", "scheduler.pt"])
def test_a_file_that_is_cut_off_is_found(tmp_path, whole, name):
    shutil.copytree(whole[1] / "checkpoint-6", tmp_path / "checkpoint-6")
    assert damage(tmp_path / "checkpoint-6") is None
    os.truncate(tmp_path / "checkpoint-6" / name, 600)
    assert damage(tmp_path / "checkpoint-6") == f"{name} is damaged: it is not what was saved"
    with pytest.raises(InputError, match=f"{name} is damaged"):
        train(tmp_path, resume=str(tmp_path / "checkpoint-6"))


def test_a_checkpoint_without_weights_is_none(tmp_path, whole):
    shutil.copytree(whole[1] / "checkpoint-6", tmp_path / "checkpoint-6")
    (tmp_path / "checkpoint-6" / "model.safetensors").unlink()
    assert damage(tmp_path / "checkpoint-6") == "model.safetensors is missing"
    (tmp_path / "checkpoint-6" / "checkpoint_files.json").unlink()
    assert damage(tmp_path / "checkpoint-6") == "it has no weights"


def test_the_newest_is_the_one_of_the_most_steps(tmp_path):
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text('{"global_step": 9}')
        save_file({}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
        for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            torch.save({}, tmp_path / f"checkpoint-{step}" / name)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-mine").mkdir()
    assert last_intact_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(InputError, match="there is no checkpoint there"):
        train(tmp_path, resume=True)


def test_unfinished_checkpoints_do_not_count_among_those_that_are_kept(tmp_path, whole):
    shutil.copytree(whole[1] / "checkpoint-2", tmp_path / "checkpoint-2")
    shutil.copytree(whole[1] / "checkpoint-6", tmp_path / "checkpoint-60")
    (tmp_path / "checkpoint-60" / "checkpoint_files.json").write_text("")
    train(tmp_path, resume=True, save_total_limit=1)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]


def test_a_folder_without_a_state_is_nobodys_to_remove(tmp_path, whole):
    shutil.copytree(whole[1] / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-60").mkdir()
    train(tmp_path, resume=True)
    assert (tmp_path / "checkpoint-60").is_dir()


class FullDisk(TrainerCallback):
    """From a step on, no file may be longer than so many bytes."""

    def __init__(self, step, limit):
        self.step, self.limit = step, limit

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))


def train_on_full_disk(folder, limit):
    try:
        train(folder, callbacks=[FullDisk(3, limit)])
    except RunError as error:
        (folder / "error.txt").write_text(str(error))


# The size of the weights is 1.9 MB, and that of the optimizer's state twice as much.
@pytest.mark.parametrize("limit", [1_000_000, 2_500_000], ids=["weights", "optimizer"])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, whole, limit):
    assert in_a_process(train_on_full_disk, tmp_path, limit) == 0
    message = (tmp_path / "error.txt").read_text()
    assert f"{tmp_path / 'checkpoint-4'} could not be written" in message
    assert "MB are free" in message
    assert "`resume_from_checkpoint=last`" in message
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    same_ending(train(tmp_path, resume=True), whole[0])


def test_a_full_disk_at_the_end_is_explained_as_well(tmp_path):
    trainer = train(tmp_path, max_steps=2)

    def save():
        FullDisk(2, 1_000_000).on_step_end(None, trainer.state, None)
        try:
            trainer.save_model()
        except RunError as error:
            (tmp_path / "error.txt").write_text(str(error))

    assert in_a_fork(save) == 0
    assert f"{tmp_path} could not be written" in (tmp_path / "error.txt").read_text()
    assert damage(tmp_path / "checkpoint-2") is None


def test_an_error_that_is_not_the_disks_is_raised_as_it_is(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError("not about the disk")

    monkeypatch.setattr(TrainerState, "save_to_json", fail)
    with pytest.raises(PermissionError, match="not about the disk"):
        train(tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_best_checkpoint_that_is_gone_costs_no_training(tmp_path, whole, warnings):
    shutil.copytree(whole[1] / "checkpoint-6", tmp_path / "checkpoint-6")
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    state.update(best_model_checkpoint="elsewhere/checkpoint-2", best_global_step=2)
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "checkpoint-6" / "checkpoint_files.json").unlink()
    assert train(tmp_path, resume=True, save_total_limit=1).state.global_step == 6
    assert "checkpoint-2, is gone" in warnings.text
