"""Read a suite's YAML file, and say what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml

from entame_hf import InputError
from entame_hf.config import Method

from .peers import RunArguments
from .suite import SELECTORS, Settings, Suite, known

SUITES = Path(__file__).parent.parent / "suites"
KEYS = ("models", "datasets", "methods", "seeds", "arguments", "grid", "overrides", "image")
NEEDED = ("models", "datasets", "methods", "seeds", "image")
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
            method: {"entame_method": method} for method in known(methods, f"{path}: methods", get_args(Method))
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
        known([label], f"{where}: {key}", labels[key])
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
    return given if allowed is None else {key: given[key] for key in known(list(given), where, allowed)}


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
