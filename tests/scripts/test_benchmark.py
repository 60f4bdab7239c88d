"""The benchmark script on a host with several GPUs."""

from __future__ import annotations

import json
import os

import benchmark
import pytest


@pytest.mark.parametrize(("visible", "used"), [(None, "0"), ("2,3", "2"), ("GPU-a,GPU-b", "GPU-a"), ("", "")])
@pytest.mark.parametrize("what", ["throughput", "overhead", "scaling"])
def test_all_but_scaling_use_one_gpu(what, visible, used, monkeypatch, capsys):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(benchmark, what, lambda options: {"seen": os.environ.get("CUDA_VISIBLE_DEVICES")})
    monkeypatch.setattr("sys.argv", ["benchmark.py", what])
    # Recorded, so that it is restored after the test.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    benchmark.main()
    assert json.loads(capsys.readouterr().out)["seen"] == (visible if what == "scaling" else used)
