"""FSDP2 through accelerate and Trainer gives what one process gives; on the CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import train as worker
from conftest import launch_by
from safetensors.torch import load_file

pytestmark = pytest.mark.runs

WORKER = Path(__file__).with_name("train.py")
STEPS = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "head_lr": "auto"}
SGD = {"optim": "sgd", "optim_args": "momentum=0.9", "learning_rate": 0.05, **STEPS}
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-3, **STEPS}
PLAIN = {"optim": "adamw_torch", "learning_rate": 1e-3, "logging_steps": 1, "max_steps": 4}
ALIKE = {
    "sgd": SGD,
    "adam": ADAM,
    "standing-still": PLAIN | {"freeze_backbone": True},
    "warmed-up": PLAIN | {"entame_method": "base_wu"},
    "accumulated": PLAIN | {"gradient_accumulation_steps": 2},
    "mixed": PLAIN | {"mixed": True},
    "informed": PLAIN | {"entame_method": "informed"},
    "recommended": PLAIN | {"recipe": "recommended", "batch_norm": "own"},
}
HALF = {"batch_norm": "own", "bf16": True, "logging_steps": 1, "max_steps": 1, "optim": "adamw_torch"}


def run(folder: Path, runs: dict[str, dict]) -> CompletedProcess[str]:
    """Run them in two processes, one after the other: a run may resume from an earlier one's checkpoint."""
    argv = []
    for name, options in runs.items():
        (folder / name).mkdir(exist_ok=True)
        argv += [str(folder / name), json.dumps({"per_device_train_batch_size": 8, "fsdp_on_cpu": True, **options})]
    return launch_by("fsdp2", "--num_processes", "2", "--mixed_precision", "no", str(WORKER), *argv, timeout=180)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    again = {
        f"{name}-resumed": ALIKE[name] | {"resume": str(folder / name / "checkpoint-2")} for name in ("sgd", "adam")
    }
    result = run(folder, ALIKE | again | {"half": HALF})
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def log_of(folder: Path, key: str) -> list[float]:
    log = torch.load(folder / "rank0.pt", weights_only=False)["log"]
    return [entry[key] for entry in log if key in entry]


@pytest.mark.parametrize("name", ALIKE)
def test_two_processes_equal_one(tmp_path, sharded, name):
    worker.main(str(tmp_path), json.dumps({"per_device_train_batch_size": 16, **ALIKE[name]}))
    # Adam's first steps are as long for a gradient that is nothing but rounding.
    tolerance = 1e-3 if name == "adam" else 1e-4
    assert log_of(sharded / name, "loss") == pytest.approx(log_of(tmp_path, "loss"), abs=tolerance)
    assert log_of(sharded / name, "head_lr") == pytest.approx(log_of(tmp_path, "head_lr"), rel=1e-5)
    if "save_steps" not in ALIKE[name]:
        return
    one, two = (load_file(folder / "checkpoint-4" / "model.safetensors") for folder in (tmp_path, sharded / name))
    assert two.keys() == one.keys()
    if name == "sgd":
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_run_goes_on_from_a_checkpoint(sharded, name):
    assert log_of(sharded / f"{name}-resumed", "loss")[-2:] == pytest.approx(log_of(sharded / name, "loss")[-2:])
    # Stored, and not measured anew.
    assert log_of(sharded / f"{name}-resumed", "head_lr") == log_of(sharded / name, "head_lr")


def test_batch_normalisation_trains_in_half_precision(sharded):
    assert log_of(sharded / "half", "loss")[0] == pytest.approx(math.log(10), abs=1e-5)


@pytest.mark.slow
def test_what_torch_could_not_restore_is_refused_before_a_step(tmp_path):
    result = run(tmp_path, {"run": SGD | {"optim_args": None}})
    assert result.returncode != 0
    assert "torch cannot restore SGD without momentum under FSDP" in result.stderr
    assert not list((tmp_path / "run").iterdir())
