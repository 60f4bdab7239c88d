"""The file of result lines: one JSON object a run, appended by any number of processes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from entame_hf import InputError

# Bytes that no line has.
_LONGEST = 2**20
_IDENTITY = ("model", "dataset", "method", "seed", "settings")

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Read the result lines of a file; what a killed process left of one is passed over.

    Args:
        path (`Path`): the file; none is as good as an empty one.

    Returns:
        `list[dict]`: the lines, in the order they were written.
    """
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        # The end of a torn line may be a number.
        if isinstance(line, dict):
            lines.append(line)
    return lines


def append_line(path: Path, line: Line) -> None:
    """Append a result line as a whole, in the place of what a killed process may have left of one.

    Args:
        path (`Path`): the file; it and its folder are made where they are missing.
        line (`dict`): what JSON can hold; NaN and infinity it can't.
    """
    text = json.dumps(line, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _repair(file)
        # One write to the end of the file: a process that is killed has written it or, at worst, its beginning.
        file.write(text.encode())


def _repair(file: Any) -> None:
    """End the last line, or cut it off where a killed process left only its beginning."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LONGEST))
    _, _, last = file.read().rpartition(b"\n")
    try:
        if last:
            json.loads(last)
            file.write(b"\n")
    except ValueError:
        file.truncate(end - len(last))


def identity(model: str, dataset: str, method: str, seed: int, settings: dict[str, Any]) -> str:
    """Say in one string which run this is: two runs of the same identity would give the same result."""
    return json.dumps([model, dataset, method, seed, settings], sort_keys=True)


def done(path: Path) -> set[str]:
    """Find the identities of the runs whose lines a file holds.

    Raises:
        InputError: it holds lines of another kind.
    """
    lines = read_lines(path)
    if any(not line.keys() >= set(_IDENTITY) for line in lines):
        raise InputError(f"--results {path} holds something else than results of this script: give another file.")
    return {identity(*(line[name] for name in _IDENTITY)) for line in lines}
