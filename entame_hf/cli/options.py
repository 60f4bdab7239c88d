"""Parse options from a command line, a YAML or JSON file, or both; every mistake is one line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from argparse import Action, ArgumentTypeError, Namespace
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from enum import Enum
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any, NoReturn

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from ..errors import InputError, unknown_value
from .options_file import FILES, read_options

# What other tools call these options.
ALIASES = {
    "batch": "per_device_train_batch_size",
    "batch_size": "per_device_train_batch_size",
    "bs": "per_device_train_batch_size",
    "data": "data_dir",
    "data_path": "data_dir",
    "dataset": "dataset_name",
    "epochs": "num_train_epochs",
    "freeze": "freeze_backbone",
    "img_size": "image_size",
    "imgsz": "image_size",
    "lr": "learning_rate",
    "method": "entame_method",
    "model": "model_name_or_path",
    "num_epochs": "num_train_epochs",
    "num_workers": "dataloader_num_workers",
    "optimizer": "optim",
    "out": "output_dir",
    "output": "output_dir",
    "resume": "resume_from_checkpoint",
    "scheduler": "lr_scheduler_type",
    "train_dir": "data_dir",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
    "workers": "dataloader_num_workers",
}

# Columns of a help text, and where descriptions begin.
WIDTH, COLUMN = 79, 32

# Fields that hold a list, or one string.
LISTS = ("models", "report_to")


class OptionParser(HfArgumentParser):
    """Parse options into dataclasses.

    An option is written with underscores or hyphens. The first argument may be a YAML or JSON file of options; options
    that follow take precedence over the file.
    """

    def __init__(self, kinds: list[Any], description: str, without: Collection[str] = ()) -> None:
        self.options: dict[str, Action] = {}
        self._without = without
        super().__init__(kinds, description=description, allow_abbrev=False, add_help=False)
        super().add_argument("--help_all", "--help-all", action="store_true")

    # The place where HfArgumentParser says what it made of a field.
    def add_argument(self, *names: str, **settings: Any) -> Any:
        if not names[0].startswith("-"):
            return super().add_argument(*names, **settings)
        name = names[0].removeprefix("--")
        if name.removeprefix("no_") in self._without:
            return None
        if "action" in settings:
            return super().add_argument(*names, **settings)
        if name in LISTS:
            settings |= {"nargs": "*", "type": str}
        if "choices" in settings:
            settings["type"] = partial(_choice, [str(getattr(c, "value", c)) for c in settings.pop("choices")])
        else:
            settings["type"] = _TYPES.get(settings.get("type"), settings.get("type", str))
        if settings["type"] is _switch:
            settings |= {"nargs": "?", "const": True}
        action = super().add_argument(*names, **settings)
        self.options[name] = action
        return action

    def given(self, argv: list[str]) -> dict[str, Any]:
        """Find the values that a command line sets, by the names of the options; defaults are left out."""
        if argv and Path(argv[0]).suffix in FILES:
            argv = [*self._typed(argv[0]), *argv[1:]]
        unset = object()
        values = Namespace(**{action.dest: unset for action in self.options.values()})
        values, unknown = self.parse_known_args(argv, values)
        if unknown:
            self._refuse(unknown[0])
        found = {name: _plain(value) for name, value in vars(values).items() if value is not unset}
        if found.pop("help_all"):
            print(all_options(self))
            sys.exit(0)
        for name in LISTS:
            if isinstance(found.get(name), list):
                found[name] = [part for value in found[name] for part in value.split(",") if part] or ["none"]
        if str(found.get("optim_args", "")).startswith("{"):
            found["optim_args"] = _pairs(found["optim_args"])
        return found

    def build(self, given: dict[str, Any]) -> tuple[Any, ...]:
        """Build the dataclasses from values by the names of the options."""
        try:
            return tuple(
                kind(**{f.name: given[f.name] for f in fields(kind) if f.init and f.name in given})
                for kind in self.dataclass_types
            )
        # The fields' own checks.
        except (TypeError, ValueError) as error:
            raise InputError(str(error)) from error

    def named(self, message: str) -> str:
        """Write the options that a message names in backticks as they are typed: `seed=1` becomes --seed 1."""

        def typed(match: re.Match[str]) -> str:
            # Python's quotes around text.
            name, value = match["name"], match["value"] and match["value"].strip("\"'")
            if name not in self.options:
                return match[0]
            if value == "True" and self.options[name].type is _switch:
                value = None
            return f"--{name}" if value is None else f"--{name} {shlex.quote(value)}"

        return re.sub(r"`(?P<name>\w+)(?:=(?P<value>[^`]*))?`", typed, message)

    def error(self, message: str) -> NoReturn:
        name = re.match(r"argument (--\w+)\S*: (.*)", message, re.DOTALL)
        message = f"{name[1]}: {name[2]}" if name else message
        raise InputError(f"{message.rstrip('.')}. --help lists the options.")

    def _typed(self, path: str) -> list[str]:
        """Write a file's options as they would be typed, which checks types and choices."""
        argv: list[str] = []
        for key, value in read_options(path).items():
            name = key.replace("-", "_")
            if name not in self.options:
                self._refuse(f"--{key}", f"{path}: ")
            if isinstance(value, list) and self.options[name].nargs not in ("*", "+"):
                raise InputError(f"{path}: `{name}` takes one value, not a list.")
            if isinstance(value, list):
                argv += [f"--{name}", *value]
            else:
                argv.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        return argv

    def _refuse(self, argument: str, where: str = "") -> NoReturn:
        if not re.match(r"--?[a-zA-Z]", argument):
            raise InputError(
                f"{where}Unexpected argument {argument!r}: a file of options comes first, every other value after its "
                "option. --help lists the options."
            )
        name = argument.lstrip("-").partition("=")[0].replace("-", "_")
        if name in self._without:
            raise InputError(f"{where}--{name} has no effect on this command. Leave it out.")
        known = {option: option for option in self.options}
        known |= {alias: meant for alias, meant in ALIASES.items() if meant in known}
        found = known.get(next(iter(get_close_matches(name, known, n=1)), ""))
        hint = f"Did you mean --{found}? " if found else ""
        raise InputError(f"{where}Unknown option --{name}. {hint}--help lists the options, --help_all all of them.")


def _plain(value: Any) -> Any:
    """Give the values of enumerations, which files of options cannot hold."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.value if isinstance(value, Enum) else value


def _choice(allowed: Iterable[str], value: str) -> str:
    if value in allowed:
        return value
    raise ArgumentTypeError(unknown_value("", value, allowed).strip().rstrip("."))


def _whole_number(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ArgumentTypeError(f"{value!r} is no whole number, such as 10") from None


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ArgumentTypeError(f"{value!r} is no number, such as 0.1 or 1e-4") from None


def _switch(value: str | bool) -> bool:
    word = str(value).lower()
    if word not in _SWITCHES:
        raise ArgumentTypeError(f"{value!r} is neither true nor false")
    return _SWITCHES[word]


_SWITCHES = {
    **dict.fromkeys(("true", "yes", "on", "y", "t", "1"), True),
    **dict.fromkeys(("false", "no", "off", "n", "f", "0"), False),
}

_TYPES: dict[Any, Callable[[Any], Any]] = {int: _whole_number, float: _number, string_to_bool: _switch}


def _pairs(text: str) -> str:
    """Write a mapping of optimizer options as `optim_args` takes them: momentum=0.9,nesterov=True."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise InputError(f"`optim_args` {text} is no mapping: {error}. Give momentum=0.9,nesterov=True.") from error
    for name, value in options.items():
        if isinstance(value, (dict, list)):
            raise InputError(f"`optim_args`: {name} takes one value, not {json.dumps(value)}.")
    words = {word: meant for word, meant in _SWITCHES.items() if len(word) > 1}
    return ",".join(f"{name}={words.get(value, value)}" for name, value in options.items())


def all_options(parser: OptionParser) -> str:
    """Write a line or more about every option of a parser, in alphabetical order."""
    known = {f.name: f for kind in parser.dataclass_types for f in fields(kind)}
    return "\n".join(line for name in sorted(parser.options) for line in describe_option(parser, known[name]))


def describe_option(parser: OptionParser, field: Field[Any], default: Any = MISSING) -> list[str]:
    action = parser.options[field.name]
    default = field.default if default is MISSING else default
    text = " ".join(str(action.help or "").replace("`", "").split())
    choices = getattr(action.type, "args", None)
    if choices and len(choices[0]) <= 6 and not all(choice in text for choice in choices[0]):
        text = f"{text.rstrip('.')} ({', '.join(choices[0])})."
    if default not in (None, MISSING, False, "") and not isinstance(default, (dict, list)):
        text += f" [{getattr(default, 'value', default)}]"
    left = f"  --{field.name}"
    lines = wrap(text, WIDTH - COLUMN)
    if len(left) > COLUMN - 2:
        return [left, *(" " * COLUMN + line for line in lines)]
    return [left.ljust(COLUMN) + (lines[0] if lines else ""), *(" " * COLUMN + line for line in lines[1:])]
