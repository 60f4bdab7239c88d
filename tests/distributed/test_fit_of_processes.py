"""k processes fit the head that one process fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_ddp import launch

pytestmark = pytest.mark.runs

WORKER = Path(__file__).parent / "fit.py"


@pytest.mark.parametrize(
    ("processes", "sizes"), [(2, [[29, 11], [40, 0]]), (3, [[7, 32, 1], [0, 13, 27]])], ids=["two", "three"]
)
def test_uneven_processes_fit_the_head_of_one(processes, sizes):
    result = launch(processes, str(WORKER), json.dumps(sizes))
    assert result.returncode == 0, result.stderr[-3000:]
