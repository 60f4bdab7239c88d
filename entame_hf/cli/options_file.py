"""Read a YAML or JSON file of options as a person means it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from ..errors import InputError

FILES = (".yaml", ".yml", ".json")

Value = str | list[str] | dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values: `no` and `on` are text and 1e-6 is a number, which PyYAML's 1.1 has otherwise."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}


for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}.items():
    # Keyed by the first character; None stands for any.
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)

# PyYAML's own reads a leading 0 as octal.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def read_options(path: str) -> dict[str, Value]:
    """Read the options that a file sets.

    Numbers, switches and names stay the text that was typed, for the option's own type to read; lists are of such
    text, and mappings are parsed. Empty and null values are left out.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return _json(text, path) if path.endswith(".json") else _yaml(text, path)
    except InputError:
        raise
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"{path} cannot be read as options: {reason}.") from error


def _yaml(text: str, path: str) -> dict[str, Value]:
    loader = _Loader(text)
    node = loader.get_single_node()
    if not isinstance(node, yaml.MappingNode):
        raise _no_mapping(path)
    _refuse_repeated_keys(node, path)
    found = {str(key.value): _yaml_value(loader, value) for key, value in node.value}
    return {key: value for key, value in found.items() if value is not None}


def _yaml_value(loader: _Loader, node: yaml.Node) -> Value | None:
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag.endswith(":null") else str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(part, yaml.ScalarNode) for part in node.value):
        return [str(part.value) for part in node.value]
    value = loader.construct_object(node, deep=True)
    return value if isinstance(value, dict) else json.dumps(value)


def _refuse_repeated_keys(node: yaml.Node, path: str) -> None:
    if isinstance(node, yaml.MappingNode):
        _check_keys([str(key.value) for key, _ in node.value], path)
    for part in node.value if isinstance(node.value, list) else []:
        for child in part if isinstance(part, tuple) else (part,):
            _refuse_repeated_keys(child, path)


def _json(text: str, path: str) -> dict[str, Value]:
    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _check_keys([key for key, _ in pairs], path)
        return dict(pairs)

    options = json.loads(text, object_pairs_hook=mapping)
    if not isinstance(options, dict):
        raise _no_mapping(path)
    return {key: _json_value(value) for key, value in options.items() if value is not None}


def _json_value(value: Any) -> Value:
    if isinstance(value, list):
        return [str(part) for part in value]
    return value if isinstance(value, dict) else str(value)


def _check_keys(keys: list[str], path: str) -> None:
    seen = set()
    for key in keys:
        name = key.replace("-", "_")
        if name in seen:
            raise InputError(f"{path} sets `{name}` twice. Keep one of the two.")
        seen.add(name)


def _no_mapping(path: str) -> InputError:
    return InputError(f"{path} must hold one mapping of options to values, such as learning_rate: 1e-4.")
