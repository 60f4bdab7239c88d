"""Command lines whose every mistake ends in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from ..errors import InputError

FILES = (".yaml", ".yml", ".json")


class OptionParser(HfArgumentParser):
    """Parse options into dataclasses, from a command line or from one YAML or JSON file.

    Args:
        kinds (`list[type]`): the dataclasses.
        description (`str`): what `--help` starts with.
    """

    def __init__(self, kinds: list[Any], description: str) -> None:
        super().__init__(kinds, description=description, allow_abbrev=False)

    def parse(self, argv: list[str]) -> tuple[Any, ...]:
        """Parse the arguments of a process.

        Args:
            argv (`list[str]`): options, or the path of one file that holds them.

        Returns:
            `tuple`: an instance of each dataclass.

        Raises:
            InputError: an option is unknown or its value is not one of its type or domain.
        """
        if argv and Path(argv[0]).suffix in FILES:
            if len(argv) > 1:
                raise InputError(f"Options come from {argv[0]} or from the command line, not from both.")
            argv = read_options(argv[0])
        try:
            *parsed, unknown = self.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        # The fields' own checks.
        except ValueError as error:
            raise InputError(str(error)) from error
        if unknown:
            raise InputError(f"Unknown option {unknown[0]}. --help lists what there is.")
        return tuple(parsed)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. --help lists what there is.")


def read_options(path: str) -> list[str]:
    """Turn a file of options into a command line, which checks types and choices.

    Args:
        path (`str`): a YAML or JSON file with one mapping, option names to values.

    Returns:
        `list[str]`: arguments as they would be typed.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    try:
        text = Path(path).read_text()
        options = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read as options: {error}") from error
    if not isinstance(options, dict):
        raise InputError(f"{path} must hold one mapping of options to values, such as `learning_rate: 1e-4`.")
    argv = []
    for name, value in options.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            argv += [f"--{name}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return argv
