"""Models that are sharded already: FSDP2 and ZeRO-3, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharded
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
