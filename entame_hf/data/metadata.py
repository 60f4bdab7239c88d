"""Read labels of images from metadata.csv, metadata.jsonl or metadata.parquet."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter, defaultdict
from textwrap import shorten
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Value

from ..errors import InputError
from .skipped import SkippedImage
from .source import Rows, Source, count_of
from .splits import TRAIN, UNLABELED, normal, split_kinds
from .tree import Folder

FILE_COLUMN = "file_name"


def read_metadata(root: Folder, named: set[str], label_column_name: str | None = None) -> Source | None:
    """Read the splits of a folder whose labels stand in metadata files.

    A file's paths are relative to its folder. Labels are text, as they stand there. A row belongs to the split whose
    folder its image lies in, and to train where folders are no splits.

    Args:
        root ([`Folder`]): the folder.
        named (`set[str]`): folders that the user takes for splits.
        label_column_name (`str`, *optional*): the column of the labels; by default "label" or "labels", or the only
            column beside "file_name".

    Returns:
        [`Source`] or `None`: `None` where no metadata file has labels.

    Raises:
        InputError: If a file can't be read, an image has two labels, or a class loses most of its images.
    """
    files = [path for folder in root.walk() for path in folder.metadata]
    # With class folders, a file of captions or boxes alone is no fault.
    needed = not root.filled or label_column_name is not None
    tables = {path: rows for path in sorted(files) if (rows := _read(path, label_column_name, needed)) is not None}
    if not tables:
        return None
    known = {normal(path): path for path in root.images()}
    labels: dict[str, str | int] = {}
    where: dict[str, str] = {}
    lost: list[tuple[str, str | int]] = []
    repeated = 0
    for file, rows in tables.items():
        for number, (name, label) in enumerate(rows, start=1):
            path = _find(os.path.dirname(file), name, known)
            if path is None:
                lost.append((os.path.join(os.path.dirname(file), name), label))
            elif path in labels and labels[path] != label:
                raise InputError(
                    f"{path} has two labels: {labels[path]!r} in {where[path]} and {label!r} in row {number} of "
                    f"{file}. "
                    "Remove one of the rows."
                )
            else:
                repeated += path in labels
                labels[path], where[path] = label, f"row {number} of {file}"
    _check_types(labels, where)
    _check_lost(labels, lost, tables)
    source = Source({}, f"{', '.join(sorted({os.path.basename(file) for file in tables}))} beside images")
    unnamed = sorted(set(known.values()) - labels.keys())
    total = sum(map(len, tables.values()))
    source.notes.append(f"{total:,} rows of metadata and {count_of(len(known), 'image')}: {len(labels):,} match.")
    if repeated:
        source.notes.append(f"{count_of(repeated, 'row')} of metadata repeat another row.")
    if lost:
        source.notes.append(f"{count_of(len(lost), 'row')} of metadata without a file left out.")
        source.skipped += [SkippedImage(path, "", "row of metadata without a file") for path, _ in lost]
    source.leave_out(unnamed, "", "no row of metadata", root.path)
    source.splits = _tables(root, labels, named, label_column_name or "label")
    return source


def _tables(root: Folder, labels: dict[str, str | int], named: set[str], column: str) -> dict[str, Rows]:
    tops = {path: os.path.relpath(path, root.path).split(os.sep)[0] for path in labels}
    kinds = split_kinds(sorted(set(tops.values())))
    are_splits = TRAIN in kinds.values() or bool(named & set(tops.values()))
    splits: dict[str, dict[str, str | int]] = defaultdict(dict)
    for path in sorted(labels):
        top = tops[path]
        known = are_splits and (top in named or kinds.get(top, UNLABELED) != UNLABELED)
        splits[top if known else TRAIN][path] = labels[path]
    kind = Value("int64" if all(isinstance(label, int) for label in labels.values()) else "string")
    features = Features({"image": datasets.Image(decode=False), column: kind})
    try:
        return {
            split: Dataset.from_dict({"image": list(rows), column: list(rows.values())}, features=features)
            for split, rows in splits.items()
        }
    except UnicodeEncodeError as error:
        raise InputError(f"The file name {error.object!a} is not UTF-8. Rename it.") from error


def _find(folder: str, name: str, known: dict[str, str]) -> str | None:
    for spelling in (name, name.replace("\\", "/")):
        path = os.path.normpath(os.path.join(folder, spelling))
        if found := known.get(normal(path)):
            return found
        if os.path.isfile(path):
            return path
    return None


def _check_types(labels: dict[str, str | int], where: dict[str, str]) -> None:
    first = {type(label): path for path, label in labels.items()}
    if len(first) > 1:
        text, number = first[str], first[int]
        raise InputError(
            f"Labels are text in some rows ({labels[text]!r} in {where[text]}) and numbers in others "
            f"({labels[number]!r} in {where[number]}). Write all of them in one way."
        )


def _check_lost(labels: dict[str, str | int], lost: list[tuple[str, str | int]], tables: dict[str, Any]) -> None:
    if not labels:
        file = next(iter(tables))
        example = f", such as {lost[0][0]}" if lost else ""
        raise InputError(f"No row of {file} has a file{example}. Paths are relative to the folder of {file}.")
    kept, gone = Counter(labels.values()), Counter(label for _, label in lost)
    worst = [label for label in gone if gone[label] > kept[label]]
    if worst:
        label = max(worst, key=lambda label: gone[label])
        example = next(path for path, other in lost if other == label)
        raise InputError(
            f"Class {label!r} loses {gone[label]:,} of {gone[label] + kept[label]:,} images: their rows of metadata "
            "have "
            f"no file, such as {example}. Add the files or remove the rows."
        )


def _read(path: str, label_column_name: str | None, needed: bool) -> list[tuple[str, str | int]] | None:
    """Read names and labels; `None` where there are no labels, or none that is sure and needed."""
    rows = _READERS[os.path.splitext(path)[1].lower()](path)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if FILE_COLUMN not in columns:
        if not needed:
            return None
        raise InputError(
            f"{path} has no column {FILE_COLUMN!r}. Columns: {', '.join(map(str, columns))}. Rename the one that "
            "holds "
            "paths, relative to this file."
        )
    others = [name for name in columns if name != FILE_COLUMN]
    if label_column_name is not None and label_column_name not in others:
        raise InputError(f"`label_column_name={label_column_name}`: {path} has no such column. Columns: {columns}.")
    usual = [name for name in others if name in ("label", "labels")]
    chosen = [label_column_name] if label_column_name else usual or others
    if not chosen:
        return None
    if len(chosen) > 1 and not needed:
        return None
    if len(chosen) > 1:
        raise InputError(
            f"Several columns of {path} could hold the labels: {', '.join(chosen)}. Choose one: "
            f"`label_column_name={chosen[0]}`."
        )
    unlabeled = [number for number, row in enumerate(rows, start=1) if row.get(chosen[0]) in (None, "")]
    if unlabeled:
        raise InputError(
            f"{len(unlabeled):,} of {len(rows):,} rows of {path} have no label in column {chosen[0]!r}: row "
            f"{shorten(', '.join(map(str, unlabeled)), 60, placeholder=' ...')}. Add labels or remove the rows."
        )
    return [(str(row[FILE_COLUMN]), _label(row[chosen[0]], number, path)) for number, row in enumerate(rows, start=1)]


def _label(value: Any, number: int, path: str) -> str | int:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return normal(value)
    raise InputError(
        f"Row {number} of {path} has the label {shorten(repr(value), 60)}; allowed are text and integers, one label "
        "an "
        "image."
    )


def _read_csv(path: str) -> list[dict[str, Any]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            # Spreadsheets of some languages write semicolons.
            delimiter = max(",;\t", key=header.count)
            return list(csv.DictReader(file, delimiter=delimiter, strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}. Save it as UTF-8 with commas.") from error


def _read_jsonl(path: str) -> list[dict[str, Any]]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON lines: {error}. Write one object a line.") from error
    if not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} must hold one object a line, such as {{'file_name': '1.jpg', 'label': 'cat'}}.")
    return rows


def _read_parquet(path: str) -> list[dict[str, Any]]:
    try:
        return pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}. Save it again.") from error


_READERS = {".csv": _read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
