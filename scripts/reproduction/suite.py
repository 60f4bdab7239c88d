"""A suite: models × data sets × methods × seeds, from one YAML file to a list of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import yaml

from entame_hf import InputError
from entame_hf.cli import OptionParser
from entame_hf.config import Method
from entame_hf.training_args import HeadArguments

from .peers import RunArguments
from .results import identity

SUITES = Path(__file__).parent.parent / "suites"
KEYS = ("models", "datasets", "methods", "seeds", "arguments", "grid", "overrides", "image")
NEEDED = ("models", "datasets", "methods", "seeds", "image")
SELECTORS = ("model", "dataset", "method")
# What the harness decides: where a run is written, and when it is evaluated, logged and saved.
_OURS = (
    "output_dir",
    "run_name",
    "seed",
    "data_seed",
    "do_train",
    "do_eval",
    "max_steps",
    "disable_tqdm",
    "report_to",
    "project",
)
_OURS_START = ("eval_", "save_", "logging_", "log_", "push_", "hub_", "load_", "resume_", "ddp_", "fsdp", "deepspeed")

# Settings that are none of the trainer's.
_NOT_ARGUMENTS = ("image_", "model_source", "dataset_source")

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
        """List the runs, one seed after the other, so that a suite which is stopped has whole seeds.

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
            # As they will be used: 1e-4, which YAML takes for a text, is the number, and a recipe is what it fills in.
            filled = {f.name: getattr(arguments, f.name) for f in fields(HeadArguments)}
            filled = {f.name: filled[f.name] for f in fields(HeadArguments) if filled[f.name] != f.default}
            run = sources | {name: getattr(arguments, name, value) for name, value in run.items()} | filled
            # What a method or an override pins does not vary with the grid.
            if run not in found:
                found.append(run)
        return found


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
            argv += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return _parser().parse(argv)[0]


@cache
def _parser() -> OptionParser:
    return OptionParser([RunArguments], "What a run is told.")


def read_suite(name: str) -> Suite:
    """Read a suite.

    Args:
        name (`str`): a name in `scripts/suites`, or the path of a YAML file.

    Returns:
        [`Suite`]

    Raises:
        InputError: there is no such suite, or its file holds what it should not; the message says what is allowed.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else SUITES / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(suite.stem for suite in SUITES.glob("*.yaml")))
        raise InputError(f"--suite {name}: there is no such suite. Give one of {names}, or the path of a YAML file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    content = _mapping(content, f"{path}", allowed=KEYS)
    missing = [key for key in NEEDED if key not in content]
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}. A suite needs {', '.join(NEEDED)}.")
    if "image_size" not in _image(content["image"], f"{path}: image"):
        raise InputError(f"{path}: image has no size; give {IMAGE['size'][1]}.")
    models, datasets = (_sources(content[key], f"{path}: {key}") for key in ("models", "datasets"))
    methods = content["methods"]
    if isinstance(methods, list):
        methods = {
            method: {"entame_method": method} for method in _named(methods, f"{path}: methods", get_args(Method))
        }
    methods = {
        str(label): _arguments(given, f"{path}: method {label}")
        for label, given in _mapping(methods, f"{path}: methods").items()
    }
    seeds = content["seeds"]
    if type(seeds) is not int or seeds < 1:
        raise InputError(f"{path}: seeds is {seeds}; give how many, such as 24.")
    grid = _arguments(content.get("grid") or {}, f"{path}: grid")
    for argument, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{path}: grid: {argument} is {values}; give a list of values, such as [1.0e-3, 1.0e-4].")
    labels = dict(zip(SELECTORS, (models, datasets, methods), strict=True))
    overrides = content.get("overrides") or []
    if not isinstance(overrides, list):
        raise InputError(f"{path}: overrides must be a list, such as [{{model: ResNet50, learning_rate: 1.0e-5}}].")
    return Suite(
        path.stem,
        models,
        datasets,
        methods,
        seeds,
        common=_image(content["image"], f"{path}: image")
        | _arguments(content.get("arguments") or {}, f"{path}: arguments"),
        grid=grid,
        overrides=[_override(override, f"{path}: overrides", labels) for override in overrides],
    )


def _override(override: Any, where: str, labels: dict[str, Any]) -> tuple[dict[str, str], Settings]:
    override = dict(_mapping(override, where))
    selected = {key: override.pop(key) for key in SELECTORS if key in override}
    if not selected:
        raise InputError(f"{where}: {override} must say what it is for: {', '.join(SELECTORS)}.")
    for key, label in selected.items():
        _named([label], f"{where}: {key}", labels[key])
    image = _image(override.pop("image"), f"{where}: image") if "image" in override else {}
    return selected, image | _arguments(override, where)


def _sources(given: Any, where: str) -> dict[str, str]:
    """Read labels with their sources, or a plain list of sources."""
    if isinstance(given, list):
        given = {source: source for source in given}
    return {str(label): str(source) for label, source in _mapping(given, where).items()}


def _mapping(given: Any, where: str, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(given, dict) or not given:
        raise InputError(
            f"{where} holds {given or 'nothing'}, where names and values are needed, such as `name: value`."
        )
    return given if allowed is None else {key: given[key] for key in _named(list(given), where, allowed)}


def _named(given: list[Any], where: str, allowed: Any) -> list[Any]:
    for name in given:
        if name not in allowed:
            raise InputError(f"{where}: {name!r} is unknown. Allowed: {', '.join(allowed)}.")
    if not given:
        raise InputError(f"{where} is empty. Allowed: {', '.join(allowed)}.")
    return given


def _choose(flag: str, given: list[str] | None, labels: dict[str, Any]) -> list[str]:
    return list(labels) if given is None else _named(given, flag, labels)


def _image(given: Any, where: str) -> Settings:
    image = _mapping(given, where, tuple(IMAGE))
    for key, value in image.items():
        allowed, example = IMAGE[key]
        if not allowed(value):
            raise InputError(f"{where}: {key} cannot be {value}; give {example}.")
    return {f"image_{key}": value for key, value in image.items()}


def _is_colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) and v > 0 for v in value)


def _arguments(given: Any, where: str) -> Settings:
    allowed = [
        f.name for f in fields(RunArguments) if f.init and f.name not in _OURS and not f.name.startswith(_OURS_START)
    ]
    for name in given if isinstance(given, dict) else _mapping(given, where):
        if name not in allowed:
            near = get_close_matches(str(name), allowed, 3) or allowed[:8]
            raise InputError(
                f"{where}: {name!r} is no argument of a run; near it are {', '.join(near)}. Allowed are the arguments "
                "of EntameTrainingArguments, but for where, when and how a run is evaluated, logged and saved."
            )
    return dict(given)


IMAGE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "size": (lambda value: type(value) is int and value > 0, "the side in pixels, such as 224"),
    "flip": (lambda value: isinstance(value, bool), "true or false"),
    "mean": (_is_colour, "a number for each channel, such as [0.485, 0.456, 0.406]"),
    "std": (_is_colour, "a number for each channel, such as [0.229, 0.224, 0.225]"),
}
