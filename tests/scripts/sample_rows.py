"""Result rows with known numbers, for tests of the report."""

from __future__ import annotations

from reproduction.groups import Run, groups_of
from reproduction.rows import write_rows

STEPS = [*range(1, 11), 20, 40, 60]


def row(method="entame", seed=0, model="M", dataset="D", final=0.9, early=0.2, noise=0.5, **more):
    """A run whose accuracy stays at `early` for ten steps and then grows evenly to `final`."""
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
        "eval_step": STEPS,
        "eval_accuracy": [early + max(0, step - 10) / 50 * (final - early) for step in STEPS],
        "energy_step": [1, 2, 3],
        "energy_noise_share": [noise, 0.3, None],
        "energy_feature_var": [0.5, 0.4, 0.3 + seed / 10],
        "seconds": 30.0,
        "device": "Synthetic 9000",
        "processes": 4,
        "commit": "0123abc",
        "versions": {"torch": "1.0"},
        "command": "python scripts/reproduce.py run --suite synthetic",
        **more,
    }


def runs(rows):
    return [Run(each) for each in rows]


def group(rows):
    """Make the one group of rows in which no setting varies."""
    (found,) = groups_of(runs(rows), {})
    return found


def write(rows, path):
    write_rows(path, rows)
    return path


def entries(table):
    """Return a Markdown table as a dict of its rows' entries, by the first entry."""
    rows = [[entry.strip() for entry in line.strip("|").split("|")] for line in table.splitlines()]
    return {first: rest for first, *rest in rows}
