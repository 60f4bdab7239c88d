"""Compare class folders with tables that lie among the images."""

from __future__ import annotations

import json
import os
import re
from collections import Counter, defaultdict
from contextlib import suppress
from typing import Any

from ..errors import InputError
from .metadata import READERS, read_csv
from .source import Source, listed
from .splits import find_split_column
from .tree import METADATA_FILES, Folder, suffix_of

# Larger files, in bytes, are not read; nor are more files of a folder.
_LARGEST, _MOST = 2**25, 20
# Of parts; a WordNet id has more digits.
_NUMBER = re.compile(r"(?<!\d)\d{1,4}(?!\d)")
# What columns of labels are called. Other columns count where folders are numbered, as parts of an archive are.
_USUAL = frozenset({"label", "labels", "class", "classes", "class_name", "category", "target", "y"})
# A column that is the same within a folder, but for this share of what differs between folders, follows from it.
_TOLERANCE = 0.05

Table = list[dict[Any, Any]]


def compare_with_tables(root: Folder, classes: dict[str, str], source: Source) -> None:
    """Refuse class folders if a table names their images and has labels that do not follow from the folders.

    Archives of many images come in parts: HAM10000_images_part_1, HAM10000_images_part_2 beside a CSV of diagnoses.

    Args:
        root ([`Folder`]): Holds the tables, and the folders of the classes.
        classes (`dict[str, str]`): The class of each path by its folder.
        source ([`Source`]): Takes a note for each table that names images and is not read.

    Raises:
        InputError: If the table's labels are likely to be meant.
    """
    tables = {path: rows for folder in root.walk() for path in _files(folder) if (rows := _read(path))}
    if not tables:
        return
    names = sorted(set(classes.values()))
    numbered = len({_NUMBER.sub("", name) for name in names}) == 1
    images = defaultdict(list)
    for path in classes:
        for key in {os.path.basename(path), os.path.splitext(os.path.basename(path))[0]}:
            images[key].append(path)
    for file, rows in tables.items():
        column, found = _find_images(rows, images)
        covered = {classes[path] for path in found}
        if len(found) < min(len(rows), len(classes)) / 2 or len(covered) < min(2, len(names)):
            continue
        others = [name for name in rows[0] if name != column]
        values = {name: {path: str(row.get(name)) for path, row in found.items()} for name in others}
        texts = {str(name): {*of_images.values()} for name, of_images in values.items()}
        split = find_split_column(texts, texts.__getitem__)
        labels = [name for name in others if name != split and 1 < len({*values[name].values()}) <= len(found) / 2]
        usual = [name for name in labels if str(name).casefold() in _USUAL]
        if any(_follows(values[name], classes) for name in labels):
            continue
        if labels and (numbered or usual):
            raise InputError(
                f"{file} names these images, and none of its columns ({listed(labels)}) follows from the folders, "
                f"which would be the classes: {listed(names)}. {_how_to_use(file, labels[0])}; if the folders are the "
                f"classes, give `data_layout={source.layout.removeprefix('DATA_DIR/')}`."
            )
        source.notes.append(f"{file} names these images and is not read.")


def _files(folder: Folder) -> list[str]:
    """Give the files of a folder that may be tables; a file an image is none."""
    files = [path for path in folder.others if suffix_of(path) in _READERS]
    return folder.metadata + (files if len(files) <= _MOST else [])


def _how_to_use(file: str, column: Any) -> str:
    if os.path.basename(file).lower() in METADATA_FILES:
        return f"Choose the column of the labels, `label_column_name={column}`"
    folder = os.path.dirname(file)
    return f"Write the labels to {os.path.join(folder, 'metadata.csv')}, in columns file_name and label"


def _find_images(rows: Table, images: dict[str, list[str]]) -> tuple[Any, dict[str, dict[Any, Any]]]:
    """Find the column that names the most images, and the row of each."""
    found: dict[Any, dict[str, dict[Any, Any]]] = {}
    for column in rows[0]:
        named = ((_find(row.get(column), images), row) for row in rows)
        found[column] = {path: row for path, row in named if path}
    column = max(found, key=lambda name: len(found[name]))
    return column, found[column]


def _find(cell: Any, images: dict[str, list[str]]) -> str | None:
    if not isinstance(cell, str):
        return None
    name = cell.strip().replace("\\", "/").removeprefix("./")
    paths = images.get(os.path.basename(name), [])
    if len(paths) > 1:
        ends = (f"/{name}", f"/{os.path.splitext(name)[0]}")
        paths = [path for path in paths if path.endswith(ends[0]) or os.path.splitext(path)[0].endswith(ends)]
    return paths[0] if len(paths) == 1 else None


def _follows(values: dict[str, str], classes: dict[str, str]) -> bool:
    """Tell whether a column's value follows from the class of an image's folder."""
    held: dict[str, Counter[str]] = defaultdict(Counter)
    for path, value in values.items():
        held[classes[path]][value] += 1
    within = sum(counts.total() - max(counts.values()) for counts in held.values())
    overall = len(values) - max(Counter(values.values()).values())
    return within <= _TOLERANCE * overall


def _read(path: str) -> Table:
    """Read a table of any kind; of other files, and of those that can't be read, nothing."""
    with suppress(InputError, OSError, ValueError, AttributeError, LookupError, TypeError):
        if os.path.getsize(path) <= _LARGEST:
            rows = _READERS[suffix_of(path)](path)
            return rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else []
    return []


def _read_words(path: str) -> Table:
    with open(path, encoding="utf-8-sig") as file:
        text = file.read()
    delimiter = max(",;\t", key=text.count)
    words = (line.split(delimiter if delimiter in text else None) for line in text.splitlines() if line.strip())
    return [dict(enumerate(map(str.strip, line))) for line in words]


def _read_json(path: str) -> Any:
    with open(path, encoding="utf-8-sig") as file:
        held = json.load(file)
    if not isinstance(held, dict):
        return held
    if held.keys() >= {"images", "annotations"}:
        labels = {each.get("image_id"): each.get("category_id") for each in held["annotations"]}
        held = {image["file_name"]: labels.get(image.get("id")) for image in held["images"]}
    return [{"file": name, "label": label} for name, label in held.items()]


_READERS = {**READERS, ".tsv": read_csv, ".txt": _read_words, ".json": _read_json}
