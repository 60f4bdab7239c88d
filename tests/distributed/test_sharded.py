"""Models that are sharded already: FSDP2 and ZeRO-3, on the CPU."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
import torch
import torch.distributed as dist
from test_ddp import launch
from timm.layers import BatchNormAct2d
from torch import nn

from entame_hf.distributed import normalise_in_float32

WORKER = Path(__file__).with_name("sharded.py")


def test_fsdp2():
    # Here, with everything in one shard: starting processes takes longer.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sharded.main("fsdp2")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp2", "zero3"])
def test_two_processes(how, monkeypatch):
    if how == "zero3":
        pytest.importorskip("deepspeed")
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    result = launch(2, str(WORKER), how)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
@pytest.mark.parametrize("training", [True, False])
def test_batch_normalisation_computes_in_float32_beside_weights_that_do_not(kind, training):
    torch.manual_seed(0)
    usual, images = kind(3).train(training), torch.randn(4, 3, 5, 5).bfloat16()
    nn.init.normal_(usual.weight)
    usual.running_mean.fill_(0.3)
    model = nn.Sequential(copy.deepcopy(usual)).train(training)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    with pytest.raises(RuntimeError, match="scalar type"):
        model(images)
    normalise_in_float32(model)
    # A second training finds them so.
    normalise_in_float32(model)
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    out, expected = model(images), usual(images.float())
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=2e-2)
    (out.float() * images).sum().backward()
    (expected * images).sum().backward()
    torch.testing.assert_close(model[0].weight.grad.float(), usual.weight.grad, rtol=1e-2, atol=2e-2)
    assert model[0].weight.dtype == torch.bfloat16
    torch.testing.assert_close(model[0].running_mean, usual.running_mean, rtol=1e-5, atol=1e-6)
    assert isinstance(model[0], kind)
    assert model.state_dict().keys() == nn.Sequential(usual).state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize("batch_norm", [False, "own"], ids=["vit", "resnet"])
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_in_the_precision_of_its_configuration(tmp_path, monkeypatch, stage, batch_norm):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    configuration = Path(__file__).parents[2] / "scripts" / "accelerate" / f"zero{stage}.yaml"
    options = json.dumps({"max_steps": 1, "logging_steps": 1, "optim": "adamw_torch", "batch_norm": batch_norm})
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]
    worker = [str(WORKER.with_name("train.py")), str(tmp_path), options]
    result = subprocess.run(
        [*command, "--main_process_port", "0", *worker], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    log = torch.load(tmp_path / "rank0.pt", weights_only=False)["log"]
    assert next(entry["loss"] for entry in log if "loss" in entry) == pytest.approx(math.log(10), abs=1e-5)
