"""Read labels of images from metadata.csv, metadata.jsonl or metadata.parquet."""

from __future__ import annotations

import csv
import json
import os
from collections import Counter, defaultdict
from textwrap import shorten
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Image, Value

from ..errors import InputError
from .source import Rows, SkippedImage, Source, count_of, listed
from .splits import SPLIT_COLUMN, TRAIN, UNLABELED, find_split_column, normal, split_kinds
from .tree import Folder, suffix_of

FILE_COLUMN = "file_name"
_ZERO_OR_ONE = frozenset({"0", "1", "0.0", "1.0", "False", "True"})


class Row(NamedTuple):
    """Hold a row of a metadata file: the image's path, its label, the split it names and where the row stands."""

    path: str
    label: str | int
    split: str
    where: str
    split_column: str | None


def read_metadata(
    root: Folder, named: set[str], label_column_name: str | None = None, needed: bool = True
) -> Source | None:
    """Read the splits of a folder whose labels stand in metadata files; `None` where none has labels.

    A file's paths are relative to its folder. Labels are text, as they stand there, in the column "label" or
    "labels" or, if they are needed, in the only other one. A row belongs to the split that its column "split" names,
    else to the one whose folder its image lies in, else to train.

    Raises:
        InputError: If a file can't be read, an image has two labels, or a class loses most of its images.
    """
    files = sorted(path for folder in root.walk() for path in folder.metadata)
    needed = needed or label_column_name is not None
    tables = {path: rows for path in files if (rows := _read(path, label_column_name, needed)) is not None}
    if not tables:
        return None
    known = {normal(path): path for path in root.images()}
    found: dict[str, Row] = {}
    lost: list[Row] = []
    for row in (row for rows in tables.values() for row in rows):
        path = _find(row.path, known)
        if path is None:
            lost.append(row)
        elif path in found and found[path][1:3] != row[1:3]:
            other = found[path]
            what, i = ("labels", 1) if other.label != row.label else ("splits", 2)
            raise InputError(
                f"{path} has two {what}: {other[i]!r} in {other.where} and {row[i]!r} in {row.where}. Remove one of "
                "the rows."
            )
        else:
            found[path] = row
    _check_types(found)
    _check_lost(found, lost, tables)
    total = sum(map(len, tables.values()))
    source = Source({}, f"{', '.join(sorted({os.path.basename(file) for file in tables}))} beside images")
    source.split_column = next((row.split_column for row in found.values() if row.split), None)
    source.notes.append(f"{total:,} rows of metadata and {count_of(len(known), 'image')}: {len(found):,} match.")
    if repeated := total - len(lost) - len(found):
        source.notes.append(f"{count_of(repeated, 'duplicate row')} of metadata ignored.")
    if lost:
        source.notes.append(f"{count_of(len(lost), 'row')} of metadata without a file left out.")
        source.skipped += [SkippedImage(row.path, "", "row of metadata without a file") for row in lost]
    source.leave_out(sorted(set(known.values()) - found.keys()), "", "no row of metadata", root.path)
    source.splits = _tables(root, found, named, label_column_name or "label")
    return source


def _tables(root: Folder, rows: dict[str, Row], named: set[str], column: str) -> dict[str, Rows]:
    tops = {path: os.path.relpath(path, root.path).split(os.sep)[0] for path in rows}
    kinds = split_kinds(sorted(set(tops.values())))
    are_splits = TRAIN in kinds.values() or bool(named & set(tops.values()))
    known = {top for top in kinds.keys() | named if top in named or kinds[top] != UNLABELED} if are_splits else set()
    in_folder = {path: top if top in known else "" for path, top in tops.items()}
    # Names that are given may be those of folders.
    by_column = any(row.split for row in rows.values()) and named <= {row.split for row in rows.values()}
    splits: dict[str, list[str]] = defaultdict(list)
    for path in sorted(rows):
        splits[(not by_column and in_folder[path]) or TRAIN].append(path)
    numbers = all(isinstance(row.label, int) for row in rows.values())
    features = {"image": Image(decode=False), column: Value("int64" if numbers else "string")}
    features |= {SPLIT_COLUMN: Value("string")} if by_column else {}
    if by_column:
        rows = {path: row._replace(split=row.split or in_folder[path]) for path, row in rows.items()}
    return {split: _table(paths, rows, column, Features(features)) for split, paths in splits.items()}


def _table(paths: list[str], rows: dict[str, Row], column: str, features: Features) -> Dataset:
    values: dict[str, list] = {"image": paths, column: [rows[path].label for path in paths]}
    values |= {SPLIT_COLUMN: [rows[path].split for path in paths]} if SPLIT_COLUMN in features else {}
    return table(values, features)


def table(values: dict[str, list], features: Features) -> Dataset:
    """Make a table, or name the file name that can't be written as text."""
    try:
        return Dataset.from_dict(values, features=features)
    except UnicodeEncodeError as error:
        raise InputError(f"The file name {error.object!a} is not UTF-8. Rename it.") from error


def _find(path: str, known: dict[str, str]) -> str | None:
    for spelling in (path, path.replace("\\", "/")):
        spelling = os.path.normpath(spelling)
        if found := known.get(normal(spelling)):
            return found
        if os.path.isfile(spelling):
            return spelling
    return None


def _check_types(rows: dict[str, Row]) -> None:
    first = {type(row.label): row for row in rows.values()}
    if len(first) > 1:
        text, number = first[str], first[int]
        raise InputError(
            f"Labels are text in some rows ({text.label!r} in {text.where}) and numbers in others ({number.label!r} "
            f"in {number.where}). Write all of them in one way."
        )


def _check_lost(found: dict[str, Row], lost: list[Row], tables: dict[str, Any]) -> None:
    if not found:
        file = next(iter(tables))
        example = f", such as {lost[0].path}" if lost else ""
        raise InputError(f"No row of {file} has a file{example}. Paths are relative to the folder of {file}.")
    kept, gone = Counter(row.label for row in found.values()), Counter(row.label for row in lost)
    worst = max((label for label in gone if gone[label] > kept[label]), key=lambda label: gone[label], default=None)
    if worst is not None:
        example = next(row.path for row in lost if row.label == worst)
        raise InputError(
            f"Class {worst!r} loses {gone[worst]:,} of {gone[worst] + kept[worst]:,} images: their rows of metadata "
            f"have no file, such as {example}. Add the files or remove the rows."
        )


def _read(path: str, label_column_name: str | None, needed: bool) -> list[Row] | None:
    """Read rows; `None` where there are no labels, or none that is sure and needed."""
    rows = READERS[suffix_of(path)](path)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if FILE_COLUMN not in columns:
        if not needed:
            return None
        raise InputError(
            f"{path} has no column {FILE_COLUMN!r}. Columns: {', '.join(map(str, columns))}. Rename the one that "
            "holds paths, relative to this file."
        )
    split_column = find_split_column(
        [name for name in columns if name not in (FILE_COLUMN, label_column_name)],
        lambda name: {str(row.get(name)) for row in rows},
    )
    others = [name for name in columns if name not in (FILE_COLUMN, split_column)]
    if label_column_name is not None and label_column_name not in columns:
        raise InputError(f"`label_column_name={label_column_name}`: {path} has no such column. Columns: {columns}.")
    usual = [name for name in others if name in ("label", "labels")]
    chosen = [label_column_name] if label_column_name else usual or (others if needed else [])
    if not chosen or (len(chosen) > 1 and not needed):
        return None
    if len(chosen) > 1:
        if all(str(row.get(name)) in _ZERO_OR_ONE for row in rows for name in chosen):
            raise InputError(
                f"{path} holds a 0 or 1 for each of {listed(chosen)}. Write the name of each row's class in a column "
                "called label."
            )
        raise InputError(
            f"Several columns of {path} could hold the labels: {', '.join(chosen)}. Choose one: "
            f"`label_column_name={chosen[0]}`."
        )
    for column, what in ((FILE_COLUMN, "image"), (chosen[0], "label")):
        missing = [number for number, row in enumerate(rows, start=1) if row.get(column) in (None, "")]
        if missing:
            raise InputError(
                f"{len(missing):,} of {len(rows):,} rows of {path} have no {what} in column {column!r}: row "
                f"{shorten(', '.join(map(str, missing)), 60, placeholder=' ...')}. Complete or remove the rows."
            )
    folder = os.path.dirname(path)
    return [
        Row(
            os.path.join(folder, str(row[FILE_COLUMN])),
            _label(row[chosen[0]], number, path),
            "" if split_column is None or row.get(split_column) is None else str(row[split_column]),
            f"row {number} of {path}",
            split_column,
        )
        for number, row in enumerate(rows, start=1)
    ]


def _label(value: Any, number: int, path: str) -> str | int:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        return normal(value)
    raise InputError(
        f"Row {number} of {path} has the label {shorten(repr(value), 60)}; allowed are text and integers, one label "
        "an image."
    )


def read_csv(path: str) -> list[dict[str, Any]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            # Spreadsheets of some languages write semicolons.
            delimiter = max(",;\t", key=header.count)
            names, *rows = [row for row in csv.reader(file, delimiter=delimiter, strict=True) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as CSV: {error}. Save it as UTF-8 with commas.") from error
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{path} has two columns {twice[0]!r}. Rename one of them.")
    for number, row in enumerate(rows, start=1):
        if len(row) > len(names):
            raise InputError(
                f"Row {number} of {path} has {len(row)} values, and there are {len(names)} columns: {listed(names)}. "
                'Quote values that hold a comma: "a, b".'
            )
    return [dict(zip(names, row, strict=False)) for row in rows]


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


READERS = {".csv": read_csv, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
