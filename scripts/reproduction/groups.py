"""Runs that can be compared: read from result rows, grouped by the settings that vary."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from entame_hf import InputError
from entame_hf.plots import Series

from .rows import IDENTITY, Row, read_rows
from .significance import Comparison, Values, paired

PAPER: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("paper.json").read_text())
# Labels of a suite's methods, in the order of columns and legends; others follow alphabetically.
METHODS = {"base": "Base", "base_wu": "Base+WU", "mei": "MEI", "entame": "ENTAME", "keep": "keep", "fn": "FN"}
EARLY_STEPS = 10
# A model and a dataset, by their labels.
Combination = tuple[str, str]
# The settings that vary in a combination, with their values.
Varied = dict[Combination, dict[str, set[str]]]


class Run:
    """One result row."""

    model: str
    dataset: str
    method: str
    seed: int
    settings: dict[str, Any]

    def __init__(self, row: Row) -> None:
        self.row = row
        self.model, self.dataset, self.method, self.seed, self.settings = (row[name] for name in IDENTITY)
        self.combination: Combination = (self.model, self.dataset)
        self.accuracies: dict[int, float] = dict(zip(row["eval_step"], row["eval_accuracy"], strict=True))
        # Measured where the settings say "auto".
        self.head_lr: float | None = row.get("head_lr")

    def energy(self, name: str) -> Series:
        """Return the steps at which an energy was finite, and its values there."""
        pairs = zip(self.row.get("energy_step") or (), self.row.get(f"energy_{name}") or (), strict=False)
        found = [(step, value) for step, value in pairs if value is not None]
        return [step for step, _ in found], [value for _, value in found]


@dataclass(frozen=True)
class Group:
    """Runs with the same settings: they differ in model, dataset, method and seed alone."""

    title: str
    runs: tuple[Run, ...]

    @cached_property
    def models(self) -> list[str]:
        return _ordered({run.model for run in self.runs}, PAPER["speedup"])

    @cached_property
    def datasets(self) -> list[str]:
        return _ordered({run.dataset for run in self.runs}, PAPER["speedup"]["ResNet50"])

    @cached_property
    def methods(self) -> list[str]:
        return _ordered({run.method for run in self.runs}, METHODS)

    @property
    def combinations(self) -> list[Combination]:
        return [(model, dataset) for model in self.models for dataset in self.datasets]

    @property
    def plain_title(self) -> str:
        """Return the title without Markdown."""
        return self.title.replace("`", "")

    @cached_property
    def _members(self) -> dict[tuple[Combination, str], list[Run]]:
        members: dict[tuple[Combination, str], list[Run]] = {}
        for run in self.runs:
            members.setdefault((run.combination, run.method), []).append(run)
        return members

    def select(self, combination: Combination, method: str) -> list[Run]:
        """Return the runs of a method on a combination, one a seed."""
        return self._members.get((combination, method), [])

    def values(self, combination: Combination, method: str, of: Measure) -> Values:
        """Return one number a seed, without the seeds that have none."""
        found = {run.seed: of(run) for run in self.select(combination, method)}
        return {seed: value for seed, value in found.items() if value is not None}

    def compare(self, combination: Combination, first: str, second: str, of: Measure) -> Comparison | None:
        """Compare two methods on a combination, paired by seed."""
        return paired(self.values(combination, first, of), self.values(combination, second, of))

    def means(self, method: str, of: Measure) -> dict[Combination, float]:
        """Return a method's mean over seeds on each combination that it ran on."""
        found = {each: self.values(each, method, of) for each in self.combinations}
        return {each: mean(values) for each, values in found.items() if values}


# One number of a run; `None` where it was not measured.
Measure = Callable[[Run], float | None]


def final(run: Run) -> float:
    """Return the accuracy of the last evaluation, in percent."""
    return 100 * run.accuracies[max(run.accuracies)]


def early(run: Run) -> float | None:
    """Return the mean of the accuracies after each of the first steps, in percent."""
    values = [run.accuracies[step] for step in run.accuracies if step <= EARLY_STEPS]
    return 100 * (sum(values) / len(values)) if values else None


def noise_share(run: Run) -> float | None:
    """Return the noise share of the first training batch's error, before any update, in percent."""
    steps, values = run.energy("noise_share")
    return 100 * values[0] if list(steps[:1]) == [1] else None


def mean(values: Values) -> float:
    return sum(values.values()) / len(values)


def read_runs(files: Iterable[Path]) -> list[Run]:
    """Read the runs of several Parquet files, in an order of their own; equal runs count once."""
    rows: dict[str, Row] = {}
    for file in files:
        found = read_rows(file)
        if not found:
            raise InputError(
                f"--results {file} has no result rows. Type: python scripts/reproduce.py run --suite smoke"
            )
        rows = found | rows
    return [Run(rows[key]) for key in sorted(rows, key=natural)]


def varied_settings(runs: Iterable[Run]) -> Varied:
    """Find the settings that vary in each combination, with their values: one method has several values there.

    A method's own settings and a suite's overrides do not count.
    """
    settings: dict[tuple[Combination, str], list[dict[str, Any]]] = {}
    for run in runs:
        settings.setdefault((run.combination, run.method), []).append(run.settings)
    varied: Varied = {}
    for (combination, _), same in settings.items():
        for key in sorted(set().union(*same)):
            values = {short(each.get(key)) for each in same}
            if len(values) > 1:
                varied.setdefault(combination, {}).setdefault(key, set()).update(values)
    return varied


def groups_of(runs: Iterable[Run], varied: Varied, beside: Collection[str] = ()) -> list[Group]:
    """Group runs by the values of the settings that vary.

    A run whose value is not one of the varied ones (a method that sets its own) joins all groups of its combination.
    Settings named in `beside` may vary within a group.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        found = sorted(varied.get(run.combination, {}).items())
        settings = {key: values for key, values in found if key not in beside}
        own = {key: short(run.settings.get(key)) for key in settings}
        places = ({own[key]} if own[key] in values else values for key, values in settings.items())
        for point in product(*places):
            title = ", ".join(f"`{key}` {value}" for key, value in zip(settings, point, strict=True))
            members.setdefault(title, []).append(run)
    return [Group(title, tuple(members[title])) for title in sorted(members, key=natural)]


def name_of(method: str) -> str:
    return METHODS.get(method, method)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort the names of methods in the order of legends and columns."""
    return _ordered(set(names), METHODS.values())


def short(value: Any) -> str:
    """Write a setting as people do: 1e-4, 256, adamw."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def natural(text: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts ResNet50 before ResNet152."""
    parts = re.split(r"(\d+)", text.casefold())
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _ordered(labels: set[str], known: Iterable[str]) -> list[str]:
    first = [label for label in known if label in labels]
    return first + sorted(labels - set(first), key=natural)
