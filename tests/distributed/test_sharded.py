"""Models that are sharded already: FSDP2 and ZeRO-3, on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
import torch
import torch.distributed as dist
from test_ddp import launch

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


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_trains_in_the_precision_of_its_configuration(tmp_path, monkeypatch, stage):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    configuration = Path(__file__).parents[2] / "scripts" / "accelerate" / f"zero{stage}.yaml"
    options = json.dumps({"max_steps": 1, "logging_steps": 1, "optim": "adamw_torch"})
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]
    worker = [str(WORKER.with_name("train.py")), str(tmp_path), options]
    result = subprocess.run(
        [*command, "--main_process_port", "0", *worker], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    log = torch.load(tmp_path / "rank0.pt", weights_only=False)["log"]
    assert next(entry["loss"] for entry in log if "loss" in entry) == pytest.approx(math.log(10), abs=1e-5)
