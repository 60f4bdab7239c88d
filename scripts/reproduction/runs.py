"""Result lines in, runs that can be compared out."""

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

from .statistics import Values

PAPER: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("paper.json").read_text())
# By the label of the method in a suite, in the order of columns and legends; others follow in alphabetical order.
METHODS = {"base": "Base", "base_wu": "Base+WU", "mei": "MEI", "entame": "ENTAME", "keep": "keep", "fn": "FN"}
EARLY_STEPS = 10
# By model and data set: settings that vary there, with the values that they have.
Varied = dict[tuple[str, str], dict[str, set[str]]]


@dataclass(frozen=True, eq=False)
class Run:
    """One line of a file of results: accuracies by step, and the columns of energies."""

    model: str
    dataset: str
    method: str
    seed: int
    settings: dict[str, Any]
    accuracies: dict[int, float]
    energies: dict[str, list[float | None]]
    suite: str
    seconds: float
    processes: int
    device: str
    commit: str
    versions: dict[str, str]
    command: str
    # What was measured where the settings say "auto".
    head_lr: float | None

    @property
    def logit_step(self) -> float:
        """The δ that its rate was measured with, where it was; lines had none before there was another than this."""
        return float(self.settings.get("logit_step", 0.25))

    @property
    def final(self) -> float:
        return self.accuracies[max(self.accuracies)]

    @property
    def early(self) -> float | None:
        values = [self.accuracies[step] for step in self.accuracies if step <= EARLY_STEPS]
        return sum(values) / len(values) if values else None

    @property
    def noise_share(self) -> float | None:
        """Before the first update, in the error of the first training batch."""
        return dict(zip(*self.energy("noise_share"), strict=True)).get(1)

    def energy(self, name: str) -> tuple[list[int], list[float]]:
        """Steps at which an energy was finite, and its values there."""
        pairs = zip(self.energies.get("step", ()), self.energies.get(name, ()), strict=False)
        kept = [(int(step), value) for step, value in pairs if step is not None and value is not None]
        return [step for step, _ in kept], [value for _, value in kept]


@dataclass(frozen=True)
class Group:
    """Runs of one setting: what differs between two of them is the model, the data set, the method or the seed."""

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
    def cells(self) -> list[tuple[str, str]]:
        return [(model, dataset) for model in self.models for dataset in self.datasets]

    @cached_property
    def _members(self) -> dict[tuple[str, str, str], list[Run]]:
        members: dict[tuple[str, str, str], list[Run]] = {}
        for run in self.runs:
            members.setdefault((run.model, run.dataset, run.method), []).append(run)
        return members

    def select(self, model: str, dataset: str, method: str) -> list[Run]:
        """Get the runs of a cell, one a seed."""
        return self._members.get((model, dataset, method), [])

    def values(self, model: str, dataset: str, method: str, of: Callable[[Run], float | None]) -> Values:
        """Get one number a seed; seeds without it are left out."""
        found = {run.seed: of(run) for run in self.select(model, dataset, method)}
        return {seed: value for seed, value in found.items() if value is not None}


def read_runs(files: Iterable[Path]) -> list[Run]:
    """Read files of result lines.

    Args:
        files (iterable of `Path`): as `scripts/reproduce.py run` writes them.

    Returns:
        `list[Run]`: in an order that does not depend on that of the lines. A run that is there twice counts once.

    Raises:
        `InputError`: a file is missing or empty, or a line is none of a run.
    """
    runs: dict[str, Run] = {}
    for file in files:
        if not file.is_file():
            raise InputError(f"{file} is no file. Write one with: python scripts/reproduce.py run --suite smoke")
        for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if text.strip():
                run = _run(text, f"{file}, line {number}")
                identity = (run.model, run.dataset, run.method, run.settings, run.seed)
                runs.setdefault(json.dumps(identity, sort_keys=True), run)
    if not runs:
        raise InputError(
            "There is no result line to report on. Run a suite first: python scripts/reproduce.py run --help"
        )
    return [runs[key] for key in sorted(runs, key=natural)]


def varied_settings(runs: Iterable[Run]) -> Varied:
    """Find the settings of a grid in each cell, with their values: those of which a method has several there.

    A method's own arguments, and the exceptions that a suite makes for a model, are none.

    Returns:
        `dict`: settings and their values by model and data set; cells where nothing varies are left out.
    """
    settings: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        settings.setdefault((run.model, run.dataset, run.method), []).append(run.settings)
    varied: Varied = {}
    for (model, dataset, _), same in settings.items():
        for key in sorted(set().union(*same)):
            values = {short(each.get(key)) for each in same}
            if len(values) > 1:
                varied.setdefault((model, dataset), {}).setdefault(key, set()).update(values)
    return varied


def groups_of(runs: Iterable[Run], varied: Varied, beside: Collection[str] = ()) -> list[Group]:
    """Sort the runs of each cell into groups of one value each of what varies there.

    What has a value of its own, which is none of the grid's, is in all groups of its cell. Groups of the same values
    are one over cells; so are the cells where nothing varies.

    Args:
        runs (iterable of `Run`): all or some of the runs in which settings vary.
        varied (`dict`): as [`varied_settings`] finds them.
        beside (collection of `str`, *optional*): settings that may differ within a group.

    Returns:
        `list[Group]`: with titles that say the values, in their order.
    """
    members: dict[str, list[Run]] = {}
    for run in runs:
        found = sorted(varied.get((run.model, run.dataset), {}).items())
        settings = {key: values for key, values in found if key not in beside}
        own = {key: short(run.settings.get(key)) for key in settings}
        places = ({own[key]} if own[key] in values else values for key, values in settings.items())
        for point in product(*places):
            title = ", ".join(f"`{key}` {value}" for key, value in zip(settings, point, strict=True))
            members.setdefault(title, []).append(run)
    return [Group(title, tuple(members[title])) for title in sorted(members, key=natural)]


def name_of(method: str) -> str:
    return METHODS.get(method, method)


def short(value: Any) -> str:
    """Write a setting as people do: 1e-4, 256, adamw."""
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def natural(text: str) -> list[tuple[bool, int, str]]:
    """Sort as people do: ResNet50 before ResNet152."""
    parts = re.split(r"(\d+)", text.casefold())
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _ordered(labels: set[str], known: Iterable[str]) -> list[str]:
    first = [label for label in known if label in labels]
    return first + sorted(labels - set(first), key=natural)


def _run(text: str, where: str) -> Run:
    try:
        line = json.loads(text)
    except json.JSONDecodeError:
        raise InputError(
            f"{where}: this is no JSON; a run that was killed may have left half a line. Run the command that wrote "
            "the file again, or delete the line."
        ) from None
    try:
        accuracies = {int(step): float(accuracy) for step, accuracy in line["evaluations"]}
        if not accuracies or not all(0 <= accuracy <= 1 for accuracy in accuracies.values()):
            raise ValueError
        settings = dict(line["settings"])
        return Run(
            model=str(line["model"]),
            dataset=str(line["dataset"]),
            method=str(line["method"]),
            seed=int(line["seed"]),
            settings=settings,
            accuracies=accuracies,
            energies=dict(line["energies"]),
            suite=str(line["suite"]),
            seconds=float(line["seconds"]),
            processes=max(1, int(line["processes"])),
            device=str(line["device"]),
            commit=str(line["commit"] or "unknown"),
            versions=dict(line["versions"]),
            command=str(line["command"]),
            head_lr=float(line["head_lr"]) if settings.get("head_lr") == "auto" else None,
        )
    except KeyError as error:
        problem = f"it has no {error}"
    except (TypeError, ValueError):
        problem = (
            "its evaluations are no pairs of a step and an accuracy in [0, 1], or another value is of the wrong kind"
        )
    raise InputError(
        f"{where}: this is no line that `python scripts/reproduce.py run` wrote: {problem}. "
        "Pass files that it appended to, of any suites."
    )
