"""A suite: models × datasets × methods × seeds in a YAML file, and the runs that it asks for."""

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
from entame_hf.cli.options import OptionParser
from entame_hf.config import Method
from entame_hf.trainer import LOGIT_STEP
from entame_hf.training_args import AUTO, RECIPES, HeadArguments

from .peers import RunArguments
from .rows import identity

SUITES = Path(__file__).parent.parent / "suites"
NEEDED = ("models", "datasets", "methods", "seeds", "image")
KEYS = (*NEEDED, "arguments", "grid", "overrides", "extends")
SELECTORS = ("model", "dataset", "method")
# Settings that are not the trainer's.
_NOT_ARGUMENTS = ("image_", "model_source", "dataset_source", "logit_step")
# Arguments that `run.py` sets: where a run is written, and when it is evaluated, logged and saved.
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
)
_OURS_START = (
    *("eval_", "save_", "logging_", "log_", "push_", "hub_", "load_", "resume_"),
    *("ddp_", "fsdp", "deepspeed", "project"),
)

Settings = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """Labels, seed and settings of one run; settings hold all else that its result depends on."""

    model: str
    dataset: str
    method: str
    seed: int
    settings: Settings

    @property
    def identity(self) -> str:
        return identity(self.model, self.dataset, self.method, self.seed, self.settings)

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.model}, {self.dataset}, {self.method}"


@dataclass(frozen=True)
class Suite:
    """A checked suite: sources and arguments by label, and settings of all runs, of the grid and of overrides."""

    name: str
    models: dict[str, str]
    datasets: dict[str, str]
    methods: dict[str, Settings]
    seeds: int
    common: Settings
    grid: dict[str, list[Any]]
    overrides: list[tuple[dict[str, str], Settings]]

    def experiments(
        self,
        models: list[str] | None = None,
        datasets: list[str] | None = None,
        methods: list[str] | None = None,
        seeds: int | None = None,
    ) -> list[Experiment]:
        """List the runs of some labels and seeds, or of all; one seed after the other, so that seeds get complete."""
        chosen = [
            labels if given is None else known(given, f"--{name}", labels)
            for name, given, labels in (
                ("models", models, [*self.models]),
                ("datasets", datasets, [*self.datasets]),
                ("methods", methods, [*self.methods]),
            )
        ]
        if seeds is not None and not 1 <= seeds <= self.seeds:
            raise InputError(f"--seeds {seeds} is not a number from 1 to {self.seeds}, which suite {self.name} has.")
        settings = {labels: self._settings(*labels) for labels in product(*chosen)}
        return [
            Experiment(model, dataset, method, seed, run)
            for seed in range(seeds or self.seeds)
            for (model, dataset, method), found in settings.items()
            for run in found
        ]

    def _settings(self, model: str, dataset: str, method: str) -> list[Settings]:
        """Return the settings of a method on a combination, one a point of the grid."""
        labels = dict(zip(SELECTORS, (model, dataset, method), strict=True))
        special: Settings = {}
        for selected, settings in self.overrides:
            if selected.items() <= labels.items():
                special |= settings
        sources = {"model_source": self.models[model], "dataset_source": self.datasets[dataset]}
        found = []
        for values in product(*self.grid.values()):
            run = self.common | dict(zip(self.grid, values, strict=True)) | self.methods[method] | special
            if ("image_mean" in run) != ("image_std" in run):
                raise InputError(
                    f"{self.name}: {model}, {dataset}: image has mean or std alone. Give both or neither."
                )
            try:
                arguments = run_arguments(run)
            except InputError as error:
                raise InputError(f"{self.name}: {model}, {dataset}, {method}: {error}") from error
            # Values as the run uses them: YAML reads 1e-4 as text, and a recipe is the options that it sets.
            names = {f.name for f in fields(HeadArguments)}
            default = {f.name: f.default for f in fields(RunArguments) if f.name in names} | RECIPES["paper"]
            filled = {name: value for name in default if (value := arguments.resolve(name)) != default[name]}
            run = sources | {name: getattr(arguments, name, value) for name, value in run.items()} | filled
            run.pop("recipe", None)
            if run.get("head_lr") == AUTO:
                # The measured rate follows from δ, so another δ is another run.
                run["logit_step"] = LOGIT_STEP
            # An argument that a method or an override sets does not vary with the grid.
            if run not in found:
                found.append(run)
        return found


def run_arguments(settings: Settings, **ours: Any) -> RunArguments:
    """Build a run's arguments from its settings, which override `ours`."""
    given = {name: value for name, value in settings.items() if not name.startswith(_NOT_ARGUMENTS)}
    parser, argv = _parser(), []
    for name, value in (ours | given).items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            argv += [f"--{name}", *map(_word, values)]
    return parser.build(parser.given(argv))[0]


def _word(value: Any) -> str:
    # Some versions of transformers write an enum with its class.
    value = getattr(value, "value", value)
    return json.dumps(value) if isinstance(value, dict) else str(value)


@cache
def _parser() -> OptionParser:
    return OptionParser([RunArguments], "Arguments of a run.")


def read_suite(name: str) -> Suite:
    """Read the YAML file of a suite, by its name in `scripts/suites` or its path.

    A suite that `extends` another one has its keys, except for those that it gives itself.
    """
    content, path = _content(name)
    missing = [key for key in NEEDED if key not in content]
    if missing:
        raise InputError(f"{path} has no {', '.join(missing)}. A suite needs {', '.join(NEEDED)}.")
    if "image_size" not in _image(content["image"], f"{path}: image"):
        raise InputError(f"{path}: image has no size; give {IMAGE['size'][1]}.")
    models, datasets = (_sources(content[key], f"{path}: {key}") for key in ("models", "datasets"))
    methods = content["methods"]
    if isinstance(methods, list):
        methods = {each: {"entame_method": each} for each in known(methods, f"{path}: methods", get_args(Method))}
    methods = {
        str(label): _arguments(given, f"{path}: method {label}")
        for label, given in _mapping(methods, f"{path}: methods").items()
    }
    seeds = content["seeds"]
    if type(seeds) is not int or seeds < 1:
        raise InputError(f"{path}: seeds is {seeds}; give their number, such as 24.")
    grid = _arguments(content.get("grid") or {}, f"{path}: grid")
    for argument, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{path}: grid: {argument} is {values}; give a list of values, such as [1.0e-3, 1.0e-4].")
    common = _image(content["image"], f"{path}: image") | _arguments(
        content.get("arguments") or {}, f"{path}: arguments"
    )
    labels = dict(zip(SELECTORS, (models, datasets, methods), strict=True))
    overrides = content.get("overrides") or []
    if not isinstance(overrides, list):
        raise InputError(f"{path}: overrides must be a list, such as [{{model: ResNet50, learning_rate: 1.0e-5}}].")
    overrides = [_override(override, f"{path}: overrides", labels) for override in overrides]
    return Suite(path.stem, models, datasets, methods, seeds, common, grid, overrides)


def _content(name: str) -> tuple[dict[str, Any], Path]:
    path = Path(name) if name.endswith((".yaml", ".yml")) else SUITES / f"{name}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(suite.stem for suite in SUITES.glob("*.yaml")))
        raise InputError(f"--suite {name} does not exist. Give one of {names}, or the path of a YAML file.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    content = _mapping(content, f"{path}", allowed=KEYS)
    other = content.pop("extends", None)
    return (content if other is None else _content(str(other))[0] | content), path


def known(given: list[Any], where: str, allowed: Any) -> list[Any]:
    """Return names if there are any and all of them are allowed; refuse them otherwise."""
    for name in given:
        if name not in allowed:
            raise InputError(f"{where}: {name!r} is unknown. Allowed: {', '.join(allowed)}.")
    if not given:
        raise InputError(f"{where} is empty. Allowed: {', '.join(allowed)}.")
    return given


def _override(override: Any, where: str, labels: dict[str, Any]) -> tuple[dict[str, str], Settings]:
    override = dict(_mapping(override, where))
    selected = {key: override.pop(key) for key in SELECTORS if key in override}
    if not selected:
        raise InputError(f"{where}: {override} must say what it is for: {', '.join(SELECTORS)}.")
    for key, label in selected.items():
        known([label], f"{where}: {key}", labels[key])
    image = _image(override.pop("image"), f"{where}: image") if "image" in override else {}
    return selected, image | _arguments(override, where)


def _sources(given: Any, where: str) -> dict[str, str]:
    """Read sources with their labels; in a plain list, sources are their own labels."""
    if isinstance(given, list):
        given = {source: source for source in given}
    return {str(label): str(source) for label, source in _mapping(given, where).items()}


def _mapping(given: Any, where: str, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(given, dict) or not given:
        raise InputError(f"{where} has {given or 'nothing'}; give names and values, such as `name: value`.")
    return given if allowed is None else {key: given[key] for key in known(list(given), where, allowed)}


def _image(given: Any, where: str) -> Settings:
    image = _mapping(given, where, tuple(IMAGE))
    for key, value in image.items():
        allowed, example = IMAGE[key]
        if not allowed(value):
            raise InputError(f"{where}: {key} cannot be {value}; give {example}.")
    return {f"image_{key}": value for key, value in image.items()}


def _arguments(given: Any, where: str) -> Settings:
    names = [f.name for f in fields(RunArguments) if f.init and f.name not in _OURS]
    allowed = [name for name in names if not name.startswith(_OURS_START)]
    for name in given if isinstance(given, dict) else _mapping(given, where):
        if name not in allowed:
            near = get_close_matches(str(name), allowed, 3) or allowed[:8]
            raise InputError(
                f"{where}: {name!r} is not an argument of a run. Close to it: {', '.join(near)}. Allowed are the "
                "arguments of EntameTrainingArguments, without those for evaluating, logging and saving."
            )
    return dict(given)


def _is_colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(v) in (int, float) and v > 0 for v in value)


IMAGE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "size": (lambda value: type(value) is int and value > 0, "the side in pixels, such as 224"),
    "flip": (lambda value: isinstance(value, bool), "true or false"),
    "mean": (_is_colour, "a number for each channel, such as [0.485, 0.456, 0.406]"),
    "std": (_is_colour, "a number for each channel, such as [0.229, 0.224, 0.225]"),
}
