"""What the report says of result lines: synthetic ones, whose numbers are known."""

from __future__ import annotations

import json

import pytest
from reproduction.runs import groups_of, read_runs

STEPS = [*range(1, 11), 20, 40, 60]


def line(method="entame", seed=0, model="M", dataset="D", final=0.9, early=0.2, noise=0.5, **more):
    """A run whose accuracy stays at `early` for ten steps and then grows evenly to `final`."""
    evaluations = [[step, early + max(0, step - 10) / 50 * (final - early)] for step in STEPS]
    return {
        "suite": "synthetic",
        "model": model,
        "dataset": dataset,
        "method": method,
        "seed": seed,
        "settings": {"learning_rate": 1e-4, "entame_method": method} | more.pop("settings", {}),
        "classes": 10,
        "train_size": 400,
        "test_size": 100,
        "steps_per_epoch": 20,
        "evaluations": evaluations,
        "energies": {"step": [1, 2, 3], "noise_share": [noise, 0.3, None], "feature_var": [0.5, 0.4, 0.3 + seed / 10]},
        "seconds": 30.0,
        "device": "Synthetic 9000",
        "processes": 4,
        "commit": "0123abc",
        "versions": {"torch": "1.0"},
        "command": "python scripts/reproduce.py run --suite synthetic",
        **more,
    }


@pytest.fixture
def read(tmp_path):
    def read(lines):
        file = tmp_path / "lines.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_runs([file])

    return read


@pytest.fixture
def group(read):
    def group(lines):
        (found,) = groups_of(read(lines), [])
        return found

    return group


def cells(table):
    """A Markdown table as a dict of its rows' cells, by the first cell."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return {row[0]: row[1:] for row in rows}
