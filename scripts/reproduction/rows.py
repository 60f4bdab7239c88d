"""Result rows: appended to a work file while a suite runs, kept in one Parquet file a suite."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from entame_hf import InputError

Row = dict[str, Any]

# Measured at the steps in "energy_step"; `entame_hf.energy` defines them.
ENERGIES = ("noise_share", "entropy", "features_share", "feature_var", "grad_norm_backbone", "grad_norm_head")
IDENTITY = ("model", "dataset", "method", "seed", "settings")
# Methods have other settings each, so these two are JSON text in the Parquet file.
_AS_JSON = ("settings", "versions")
_MEASURED = {f"energy_{name}": pa.list_(pa.float32()) for name in ENERGIES}
SCHEMA = pa.schema(
    {
        **dict.fromkeys(("suite", "model", "dataset", "method"), pa.string()),
        "seed": pa.int32(),
        "settings": pa.string(),
        **dict.fromkeys(("classes", "train_size", "test_size", "steps_per_epoch"), pa.int32()),
        **dict.fromkeys(("head_lr", "probe_accuracy", "logme"), pa.float64()),
        "eval_step": pa.list_(pa.int32()),
        "eval_accuracy": pa.list_(pa.float64()),
        "corruption": pa.list_(pa.string()),
        "corruption_accuracy": pa.list_(pa.float64()),
        "energy_step": pa.list_(pa.int32()),
        **_MEASURED,
        "seconds": pa.float64(),
        "device": pa.string(),
        "processes": pa.int32(),
        **dict.fromkeys(("commit", "versions", "command"), pa.string()),
    }
)
# Longer than any row, in bytes.
_LONGEST = 2**20


def identity(model: str, dataset: str, method: str, seed: int, settings: dict[str, Any]) -> str:
    """Return the key of a run: two runs with the same key give the same result."""
    return json.dumps([model, dataset, method, seed, settings], sort_keys=True)


def read_rows(path: Path) -> dict[str, Row]:
    """Read the rows of a Parquet file and of its work file, by their [`identity`]; missing files have no rows."""
    rows = []
    if path.is_file():
        try:
            rows = pq.read_table(path).to_pylist()
        except pa.ArrowInvalid as error:
            raise _foreign(path) from error
    work = work_file(path)
    for text in work.read_text(encoding="utf-8", errors="replace").splitlines() if work.is_file() else []:
        try:
            rows.append(json.loads(text))
        except json.JSONDecodeError:
            # A killed process leaves an incomplete row.
            continue
    found: dict[str, Row] = {}
    for row in rows:
        # The rest of an incomplete row may be a number.
        if not isinstance(row, dict):
            continue
        if not row.keys() >= {*IDENTITY, "eval_step", "eval_accuracy"}:
            raise _foreign(path)
        row |= {name: json.loads(row[name]) for name in _AS_JSON if isinstance(row.get(name), str)}
        found.setdefault(identity(*(row[name] for name in IDENTITY)), row)
    return dict(sorted(found.items()))


def append_row(path: Path, row: Row) -> None:
    """Append a row to the work file of a Parquet file; a killed process loses at most the row that it was writing.

    The row has the columns of [`SCHEMA`], with dicts for "settings" and "versions". NaN is refused.
    """
    text = json.dumps(row, allow_nan=False) + "\n"
    with _locked(work_file(path)) as file:
        _complete_last_row(file)
        file.write(text.encode())


def compact(path: Path) -> None:
    """Move the rows of the work file into the Parquet file, and remove the work file."""
    work = work_file(path)
    if not work.is_file():
        return
    with _locked(work):
        if rows := read_rows(path):
            write_rows(path, rows.values())
        work.unlink()


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a Parquet file, in place of the old one once it is complete."""
    texts = [row | {name: json.dumps(row.get(name)) for name in _AS_JSON} for row in rows]
    table = pa.Table.from_pylist(texts, schema=SCHEMA)
    # Measured numbers hardly repeat, so a dictionary would make them larger.
    repeating = [
        f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name for f in SCHEMA if f.name not in _MEASURED
    ]
    temporary = path.with_name(f"{path.name}.incomplete")
    pq.write_table(table, temporary, compression="zstd", compression_level=19, use_dictionary=repeating)
    temporary.replace(path)


def work_file(path: Path) -> Path:
    """Return the file of JSON lines beside a suite's Parquet file."""
    if path.suffix != ".parquet":
        raise InputError(f"--results {path} must end in .parquet. Type: --results {path.with_suffix('.parquet')}")
    return path.with_suffix(".jsonl")


@contextmanager
def _locked(path: Path) -> Iterator[Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have removed the file while this one waited for the lock.
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield file
                return


def _complete_last_row(file: Any) -> None:
    """End the last row with its newline, or remove it if it is incomplete."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _LONGEST))
    _, _, last = file.read().rpartition(b"\n")
    try:
        if last:
            json.loads(last)
            file.write(b"\n")
    except ValueError:
        file.truncate(end - len(last))


def _foreign(path: Path) -> InputError:
    return InputError(
        f"--results {path} holds other rows than those of `reproduce.py run`. Give a file that it wrote."
    )
