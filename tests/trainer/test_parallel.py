"""What each host of a job must have, with the other hosts' answers given; tests/distributed has real hosts."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from transformers import TrainingArguments

from entame_hf import InputError
from entame_hf.trainer import parallel
from entame_hf.trainer.parallel import check_processes


@pytest.fixture
def others(monkeypatch) -> list:
    """What a second host's process answers; with it, there are two."""
    answers: list = []
    monkeypatch.setattr(parallel, "are_several", lambda: True)
    monkeypatch.setattr(parallel, "gather_object", lambda mine: [*mine, *answers])
    return answers


def not_there() -> str:
    raise InputError("there is no checkpoint there")


def test_all_hosts_resume_from_the_same_checkpoint(others):
    others[:] = [("checkpoint-4", None)]
    assert parallel.same_on_all(lambda: "here/checkpoint-4") == "here/checkpoint-4"


def test_resume_accepts_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parallel.same_on_all(lambda: ".") == "."


@pytest.mark.parametrize(
    ("mine", "other", "message"),
    [
        (lambda: "out/checkpoint-4", ("", "it is gone"), r"from checkpoint-4, and rank 1 from nothing \(it is gone\)"),
        (not_there, ("checkpoint-4", None), "Rank 1 would resume from checkpoint-4, and rank 0 from nothing"),
        (lambda: "out/checkpoint-4", ("checkpoint-2", None), "checkpoint-4, and rank 1 from checkpoint-2"),
        (not_there, ("", "it is gone"), "^there is no checkpoint there$"),
    ],
    ids=["missing-there", "missing-here", "another", "nowhere"],
)
def test_resume_refuses_different_checkpoints_on_every_host(others, mine, other, message):
    others[:] = [other]
    with pytest.raises(InputError, match=message):
        parallel.same_on_all(mine)


def arguments(tmp_path, **options) -> TrainingArguments:
    return TrainingArguments(
        str(tmp_path / "out"), use_cpu=True, save_strategy="steps", eval_strategy="steps", **options
    )


def test_the_first_host_writes_where_all_see_it(tmp_path, others, caplog):
    others[:] = [True]
    parallel.check_output_folder(arguments(tmp_path, load_best_model_at_end=True))
    assert not caplog.records
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(InputError, match="save_on_each_node=True leaves checkpoints without weights"):
        parallel.check_output_folder(arguments(tmp_path, save_on_each_node=True))


def test_what_only_the_first_host_has_is_said_before_the_training(tmp_path, others, caplog, monkeypatch):
    others[:] = [False]
    monkeypatch.setattr(logging.getLogger("entame_hf"), "propagate", True)
    parallel.check_output_folder(arguments(tmp_path))
    assert "this one alone keeps checkpoints" in caplog.text
    with pytest.raises(InputError, match="load_best_model_at_end=True needs"):
        parallel.check_output_folder(arguments(tmp_path, load_best_model_at_end=True))


def test_ddp_timeout_reaches_processes_on_the_cpu(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, ddp_timeout=7)
    assert args.world_size == 1
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check_processes(args)
        assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()
