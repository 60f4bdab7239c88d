"""Several GPUs give what one gives; run with `pytest -m gpu` where there are two or more."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import launch_by
from safetensors.torch import load_file

WORKER = Path(__file__).parent / "train.py"
GLOBAL_BATCH = 64
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def train(folder: Path, configuration: str, processes: int, **options) -> list[float]:
    """Train for 50 steps and return the loss of each."""
    log = state_of(folder, configuration, processes, **options)["log"]
    return [entry["loss"] for entry in log if "loss" in entry]


def state_of(folder: Path, configuration: str, processes: int, precision: str = "no", **options) -> dict:
    folder.mkdir()
    options = {
        "per_device_train_batch_size": GLOBAL_BATCH // processes,
        "max_steps": 50,
        "count": 256,
        "logging_steps": 1,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 50,
        "use_cpu": False,
        **options,
    }
    how = ["--num_processes", str(processes), "--mixed_precision", precision]
    # Sums in another order are the only difference that is allowed.
    environment = {"NVIDIA_TF32_OVERRIDE": "0", "NCCL_NVLS_ENABLE": "0"}
    result = launch_by(configuration, *how, str(WORKER), str(folder), json.dumps(options), **environment)
    assert result.returncode == 0, result.stderr[-4000:]
    return torch.load(folder / "rank0.pt", weights_only=False)


@pytest.mark.parametrize("batch_norm", [False, True], ids=["vit", "resnet-with-syncbatchnorm"])
@pytest.mark.parametrize("configuration", ["ddp", "fsdp2"])
def test_losses_equal_those_of_one_gpu(tmp_path, configuration, batch_norm):
    # At 1e-3, what differs by rounding at first differs by 1e-3 after 50 steps of the residual network.
    options = {"batch_norm": batch_norm, "learning_rate": 3e-4 if batch_norm else 1e-3}
    expected = train(tmp_path / "one", "single_gpu", 1, **options)
    assert len(expected) == 50
    assert expected[-1] < 0.8 * expected[0]
    for processes in (count for count in (2, 4) if count <= torch.cuda.device_count()):
        losses = train(tmp_path / str(processes), configuration, processes, **options)
        assert losses == pytest.approx(expected, abs=1e-3)
        one, several = (
            load_file(tmp_path / name / "checkpoint-50" / "model.safetensors") for name in ("one", str(processes))
        )
        assert one.keys() == several.keys()


@pytest.mark.parametrize("batch_norm", [False, "own"], ids=["vit", "resnet"])
@pytest.mark.parametrize("configuration", ["single_gpu", "ddp", "fsdp2", "zero2", "zero3"])
def test_the_first_loss_is_the_entropy_of_the_classes(tmp_path, configuration, batch_norm):
    """In the precision that the configurations ask for."""
    if configuration.startswith("zero"):
        pytest.importorskip("deepspeed")
    processes = 1 if configuration == "single_gpu" else 2
    options = {"max_steps": 2, "save_strategy": "no", "batch_norm": batch_norm}
    first, *_ = train(tmp_path / "run", configuration, processes, precision="bf16", **options)
    assert first == pytest.approx(math.log(10), abs=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed(tmp_path, stage):
    pytest.importorskip("deepspeed")
    expected = train(tmp_path / "one", "single_gpu", 1)
    losses = train(tmp_path / "zero", f"zero{stage}", 2)
    assert losses == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("configuration", ["ddp", "fsdp2"])
def test_the_head_rate_is_that_of_one_gpu_and_survives_resuming(tmp_path, configuration, optimizer):
    options = {"head_lr": "auto", "optim": optimizer, "max_steps": 4, "save_steps": 2, "lr_scheduler_type": "cosine"}
    if optimizer == "sgd":
        # Without, FSDP could not restore it.
        options["optim_args"] = "momentum=0.9"
    expected = state_of(tmp_path / "one", "single_gpu", 1, **options)["log"]
    log = state_of(tmp_path / "several", configuration, 2, **options)["log"]
    checkpoint = str(tmp_path / "several" / "checkpoint-2")
    resumed = state_of(tmp_path / "resumed", configuration, 2, resume=checkpoint, **options)["log"]
    (rate,), *others = ([entry["head_lr"] for entry in run if "head_lr" in entry] for run in (expected, log, resumed))
    assert others[0] == others[1] == [pytest.approx(rate, rel=1e-4)]
    losses, again = ([entry["loss"] for entry in run if "loss" in entry] for run in (log, resumed))
    assert again[-2:] == pytest.approx(losses[-2:], abs=1e-3)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_takes_a_head_rate_that_is_given(tmp_path, stage):
    pytest.importorskip("deepspeed")
    options = {"head_lr": 1e-2, "max_steps": 10, "save_steps": 10}
    expected = train(tmp_path / "one", "single_gpu", 1, **options)
    assert train(tmp_path / "zero", f"zero{stage}", 2, **options) == pytest.approx(expected, abs=1e-3)


def test_the_host_waits_for_nothing_that_processes_share(tmp_path):
    """Neither for statistics of the global batch nor for the sizes of the parts of an epoch's last one."""
    options = {"max_steps": 8, "save_strategy": "no", "logging_steps": 1000, "count_waits": True}
    alone = state_of(tmp_path / "own", "ddp", 2, znorm_sync=False, count=2 * GLOBAL_BATCH, **options)["waits"]
    shared = state_of(tmp_path / "shared", "ddp", 2, count=2 * GLOBAL_BATCH - 10, **options)["waits"]
    # The losses of the steps are read, so that the count is known to count.
    assert shared == alone > 0
