"""Models that are sharded already: FSDP2 and ZeRO-3, on the CPU."""

from __future__ import annotations

import copy
import json
import math
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import sharded
import torch
import torch.distributed as dist
from conftest import launch_by
from test_ddp import launch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD

from entame_hf import InputError
from entame_hf.trainer.parallel import check_optimizer, normalise_in_float32

WORKER = Path(__file__).with_name("sharded.py")


@pytest.fixture
def mesh():
    # Here, with everything in one shard: starting processes takes longer.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.usefixtures("mesh")
def test_fsdp2():
    sharded.main("fsdp2")


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d])
def test_fsdp2_normalises_in_float32_what_it_casts(mesh, kind):
    torch.manual_seed(0)
    usual, images = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4)), torch.randn(8, 3, 7, 7)
    model = copy.deepcopy(usual)
    normalise_in_float32(model)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=half)
    for each in (usual, model):
        each(images).square().sum().backward()
    gradient = model[1].weight.grad.full_tensor()
    torch.testing.assert_close(gradient, usual[1].weight.grad, rtol=2e-2, atol=1e-1)
    torch.testing.assert_close(model[1].running_mean, usual[1].running_mean, rtol=1e-2, atol=1e-3)


class TestOptimizer:
    @staticmethod
    def restored(mesh, **options):
        model = nn.Linear(3, 2)
        fully_shard(model, mesh=mesh)
        optimizer = SGD(model.parameters(), lr=0.1, **options)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        whole = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=whole)
        set_optimizer_state_dict(model, optimizer, state, options=whole)
        return optimizer

    def test_without_momentum_torch_cannot_restore_it(self, mesh):
        with pytest.raises(AssertionError, match="device"):
            self.restored(mesh)
        assert self.restored(mesh, momentum=0.9).state

    @pytest.mark.parametrize("plugin", [None, object()], ids=["whole", "sharded"])
    def test_so_it_is_refused_before_a_training(self, plugin):
        arguments = SimpleNamespace(save_strategy="steps")
        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
        parameters = [nn.Parameter(torch.ones(1))]
        check_optimizer(arguments, accelerator, SGD(parameters, lr=0.1, momentum=0.9))
        check_optimizer(arguments, accelerator, torch.optim.AdamW(parameters))
        with pytest.raises(InputError, match=r"`optim_args=momentum=0.9`") if plugin else nullcontext():
            check_optimizer(arguments, accelerator, SGD(parameters, lr=0.1))
        check_optimizer(SimpleNamespace(save_strategy="no"), accelerator, SGD(parameters, lr=0.1))


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
    options = json.dumps({"max_steps": 1, "logging_steps": 1, "optim": "adamw_torch", "batch_norm": batch_norm})
    result = launch_by(f"zero{stage}", str(WORKER.with_name("train.py")), str(tmp_path), options)
    assert result.returncode == 0, result.stderr[-3000:]
    log = torch.load(tmp_path / "rank0.pt", weights_only=False)["log"]
    assert next(entry["loss"] for entry in log if "loss" in entry) == pytest.approx(math.log(10), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_from_the_head_that_one_process_fits(tmp_path, monkeypatch, stage):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options = {"max_steps": 3, "logging_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    options["entame_method"] = "informed"
    logs = {}
    for how in (f"zero{stage}", "cpu"):
        folder = tmp_path / how
        folder.mkdir()
        processes = ["--num_processes", "1"]
        result = launch_by(how, *processes, str(WORKER.with_name("train.py")), str(folder), json.dumps(options))
        assert result.returncode == 0, result.stderr[-3000:]
        log = torch.load(folder / "rank0.pt", weights_only=False)["log"]
        logs[how] = [entry[key] for entry in log for key in ("probe_accuracy", "loss") if key in entry]
    found, expected = logs.values()
    assert len(found) == len(expected) == 4
    # DeepSpeed's configuration trains in bfloat16.
    assert found == pytest.approx(expected, rel=2e-2)
