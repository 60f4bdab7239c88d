"""A checkpoint that lacks the optimizer or the schedule is refused; any other resumes in its place of the schedule."""

from __future__ import annotations

import shutil

import pytest
import timm
import torch
from conftest import RandomImages
from transformers import Trainer, TrainingArguments

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.patch import as_transformers

STEPS = 8


def trainer(folder, **changes):
    torch.manual_seed(0)
    defaults = {
        **{"max_steps": STEPS, "save_steps": 4, "logging_steps": 1, "energy_logging_steps": 0, "report_to": "none"},
        **{"per_device_train_batch_size": 16, "use_cpu": True, "disable_tqdm": True, "recipe": "recommended"},
    }
    model = timm.create_model("test_resnet", num_classes=10)
    args = EntameTrainingArguments(str(folder), **{**defaults, **changes})
    return EntameTrainer(model, args, train_dataset=RandomImages(64))


def rates(done):
    return [entry["learning_rate"] for entry in done.state.log_history if "learning_rate" in entry]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    done = trainer(tmp_path_factory.mktemp("run"))
    done.train()
    return done


def refuse(folder, message, checkpoint, **changes):
    done = trainer(folder, **changes)
    with pytest.raises(InputError, match=message) as error:
        done.train(resume_from_checkpoint=checkpoint)
    assert "\n" not in str(error.value)
    assert done.state.global_step == 0


@pytest.mark.parametrize("schedule", [{}, {"lr_scheduler_type": "cosine"}, {"recipe": "paper"}], ids=str)
def test_a_checkpoint_of_the_model_alone_is_not_resumed(tmp_path, schedule, caplog):
    trainer(tmp_path, save_only_model=True, **schedule).train()
    refuse(tmp_path, "save_only_model", str(tmp_path / "checkpoint-4"), **schedule)
    refuse(tmp_path, "there is no checkpoint there", True, **schedule)
    assert "the optimizer and the schedule would start over" in caplog.text


@pytest.mark.parametrize("listed", [True, False], ids=["with a list of files", "without"])
@pytest.mark.parametrize(
    "removed",
    [
        ["optimizer.pt"], ["scheduler.pt"], ["optimizer.pt", "scheduler.pt"], ["rng_state.pth"],
        ["entame_head.safetensors"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_was_removed_by_hand_is_named(tmp_path, run, removed, listed):
    folder = shutil.copytree(f"{run.args.output_dir}/checkpoint-4", tmp_path / "checkpoint-4")
    for name in (*removed, *([] if listed else ["checkpoint_files.json"])):
        (folder / name).unlink()
    alone = "optimizer.pt" in removed and not listed
    refuse(tmp_path / "out", "it holds the model alone" if alone else removed[0], str(folder))


def test_a_final_model_is_no_checkpoint(tmp_path, run):
    run.save_model(str(tmp_path / "model"))
    refuse(tmp_path / "out", r"it has no trainer_state\.json", str(tmp_path / "model"))


@pytest.mark.parametrize("only", [True, False], ids=["model alone", "whole"])
def test_a_checkpoint_of_stock_trainer_is_resumed_if_it_is_whole(tmp_path, only):
    args = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, save_only_model=only, use_cpu=True, report_to="none",
        per_device_train_batch_size=16,
    )  # fmt: skip
    model = as_transformers(timm.create_model("test_resnet", num_classes=10))
    Trainer(model, args, train_dataset=RandomImages(64)).train()
    options = {"recipe": "paper", "lr_scheduler_type": "linear", "entame_method": "keep", "max_steps": 4}
    if only:
        refuse(tmp_path / "out", "save_only_model", str(tmp_path / "checkpoint-2"), **options)
        return
    done = trainer(tmp_path / "out", **options)
    done.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(rates(done)) == done.state.global_step - 2 == 2


@pytest.mark.parametrize("options", [{}, {"ignore_data_skip": True}, {"lr_scheduler_type": "linear"}], ids=str)
def test_the_recommended_schedule_decays_where_it_would_have(tmp_path, run, options):
    done = trainer(tmp_path, **options)
    done.train(resume_from_checkpoint=f"{run.args.output_dir}/checkpoint-4")
    assert rates(done) == rates(run)
    assert rates(run)[-1] < max(rates(run)) / 1.5
    assert int(done.optimizer.state[next(done.model.parameters())]["step"]) == STEPS
