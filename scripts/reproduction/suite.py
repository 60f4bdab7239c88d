"""A suite: models × data sets × methods × seeds, and the runs that it asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from typing import Any

from entame_hf import InputError
from entame_hf.cli.options import OptionParser
from entame_hf.trainer import LOGIT_STEP
from entame_hf.training_args import AUTO, RECIPES, HeadArguments

from .peers import RunArguments
from .results import identity

SELECTORS = ("model", "dataset", "method")
# Settings that are none of the trainer's.
_NOT_ARGUMENTS = ("image_", "model_source", "dataset_source", "logit_step")

Settings = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """Describe one run.

    Args:
        model, dataset, method (`str`): labels.
        seed (`int`): draws the head, the order of the images and their flips.
        settings (`dict`): everything else that a result depends on, where models and images come from included.
    """

    model: str
    dataset: str
    method: str
    seed: int
    settings: Settings

    @property
    def identity(self) -> str:
        """What tells this run from all others."""
        return identity(self.model, self.dataset, self.method, self.seed, self.settings)

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.model}, {self.dataset}, {self.method}"


@dataclass(frozen=True)
class Suite:
    """Hold what a suite's file says, checked.

    Args:
        name (`str`): the file's, without its ending.
        models, datasets (`dict[str, str]`): labels to sources.
        methods (`dict[str, dict]`): labels to arguments.
        seeds (`int`): how many, from 0.
        common (`dict`): settings of all runs.
        grid (`dict[str, list]`): arguments to their values; each combination is a run.
        overrides (`list[tuple[dict, dict]]`): labels that select runs, and their settings; later ones win.
    """

    name: str
    models: dict[str, str]
    datasets: dict[str, str]
    methods: dict[str, Settings]
    seeds: int
    common: Settings
    grid: dict[str, list[Any]]
    overrides: list[tuple[dict[str, str], Settings]]

    def cells(
        self,
        models: list[str] | None = None,
        datasets: list[str] | None = None,
        methods: list[str] | None = None,
        seeds: int | None = None,
    ) -> list[Cell]:
        """List the runs, one seed after the other: what one process has done when it is stopped are whole seeds.

        Args:
            models, datasets, methods (`list[str]`, *optional*): labels of a part of the suite; all by default.
            seeds (`int`, *optional*): how many seeds; all by default.

        Raises:
            InputError: there is no such label, or a run's arguments are not valid.
        """
        chosen = [
            _choose("--models", models, self.models),
            _choose("--datasets", datasets, self.datasets),
            _choose("--methods", methods, self.methods),
        ]
        if seeds is not None and not 1 <= seeds <= self.seeds:
            raise InputError(f"--seeds {seeds}: suite {self.name} has seeds for 1 to {self.seeds}.")
        settings = {(m, d, method): self._settings(m, d, method) for m, d, method in product(*chosen)}
        return [
            Cell(*labels, seed, run)
            for seed in range(seeds or self.seeds)
            for labels in settings
            for run in settings[labels]
        ]

    def _settings(self, model: str, dataset: str, method: str) -> list[Settings]:
        labels = dict(zip(SELECTORS, (model, dataset, method), strict=True))
        special: Settings = {}
        for selected, settings in self.overrides:
            if selected.items() <= labels.items():
                special |= settings
        sources = {"model_source": self.models[model], "dataset_source": self.datasets[dataset]}
        found = []
        for values in product(*self.grid.values()):
            point = dict(zip(self.grid, values, strict=True))
            run = self.common | point | self.methods[method] | special
            if ("image_mean" in run) != ("image_std" in run):
                raise InputError(f"{self.name}: {model}, {dataset}: give both mean and std of the images, or neither.")
            try:
                arguments = run_arguments(run)
            except InputError as error:
                raise InputError(f"{self.name}: {model}, {dataset}, {method}: {error}") from error
            # As they will be used: 1e-4, which YAML takes for a text, is the number, and a recipe is what it fills in:
            # where that changes, it is another run.
            default = {f.name: f.default for f in fields(HeadArguments)} | RECIPES["paper"]
            filled = {name: value for name in default if (value := arguments.resolve(name)) != default[name]}
            run = sources | {name: getattr(arguments, name, value) for name, value in run.items()} | filled
            run.pop("recipe", None)
            if run.get("head_lr") == AUTO:
                # What is measured follows from it: another δ is another run.
                run["logit_step"] = LOGIT_STEP
            # What a method or an override pins does not vary with the grid.
            if run not in found:
                found.append(run)
        return found


def _choose(flag: str, given: list[str] | None, labels: dict[str, Any]) -> list[str]:
    return list(labels) if given is None else known(given, flag, labels)


def run_arguments(settings: Settings, **ours: Any) -> RunArguments:
    """Build a run's arguments.

    Args:
        settings (`dict`): a cell's, or any part of them.
        ours: what the harness sets; settings go before them.

    Raises:
        InputError: a value is not one of its argument's type or domain.
    """
    given = {name: value for name, value in settings.items() if not name.startswith(_NOT_ARGUMENTS)}
    argv = []
    for name, value in (ours | given).items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            argv += [f"--{name}", *map(_word, values)]
    return _parser().parse(argv)[0]


def _word(value: Any) -> str:
    # Of transformers' names of optimizers and schedules, str() gives the class as well in some versions.
    value = getattr(value, "value", value)
    return json.dumps(value) if isinstance(value, dict) else str(value)


@cache
def _parser() -> OptionParser:
    return OptionParser([RunArguments], "What a run is told.")


def known(given: list[Any], where: str, allowed: Any) -> list[Any]:
    """Give names back if all of them are allowed, and any are given.

    Raises:
        InputError: they are not.
    """
    for name in given:
        if name not in allowed:
            raise InputError(f"{where}: {name!r} is unknown. Allowed: {', '.join(allowed)}.")
    if not given:
        raise InputError(f"{where} is empty. Allowed: {', '.join(allowed)}.")
    return given
