"""Choose which split is for what, and the two columns that are read of each."""

from __future__ import annotations

from functools import partial
from typing import Any

import datasets
import numpy as np
from datasets import Dataset

from ..errors import InputError
from .columns import find_image_column, find_label_column, image_names, may_name, named_rows
from .labels import count_missing
from .source import Rows, SkippedImage, Source, listed
from .splits import (
    SPLIT_COLUMN,
    TEST,
    TRAIN,
    UNLABELED,
    VALIDATION,
    choose_split,
    find_split_column,
    find_splits,
    kind_of,
    split_kinds,
)


def split_by_column(source: Source, named: set[str], label_column_name: str | None) -> None:
    """Split tables by a column that names splits.

    Raises:
        InputError: If a column of splits has other values too, and none of them is `named`; or if it contradicts the
            splits that there are.
    """
    whole = dict(source.splits)
    for own, rows in whole.items():
        if not isinstance(rows, Dataset):
            if any(name.casefold() == SPLIT_COLUMN for name in rows.features or ()) and not named:
                source.notes.append(f"column {SPLIT_COLUMN!r} of {own} is not followed in a stream.")
            continue
        columns = [name for name, feature in rows.features.items() if name != label_column_name and may_name(feature)]
        column = find_split_column(columns, partial(_names, rows))
        if column is None:
            continue
        values, codes = named_rows(rows, column)
        names = list(dict.fromkeys(values))
        if len(names) < 2 or (own in named and own not in names):
            continue
        others = {name: kind for name, kind in split_kinds(names).items() if kind != kind_of(own)}
        if len(whole) > 1 and (not others or named):
            if others:
                source.notes.append(f"column {column!r} of {own} is not followed: splits were named.")
            continue
        chosen = {name: np.isin(codes, [i for i, value in enumerate(values) if value == name]) for name in names}
        _check_column(source, own, column, chosen, named)
        rows = rows.remove_columns(column)
        parts = {name: rows.select(np.flatnonzero(here)) for name, here in chosen.items()}
        source.splits = {**{name: each for name, each in source.splits.items() if name != own}, **parts}
        source.layout += f", split by column {(source.split_column or column)!r}"


def _names(rows: Dataset, column: str) -> list[str]:
    return named_rows(rows, column)[0]


def _check_column(source: Source, own: str, column: str, chosen: dict[str, Any], named: set[str]) -> None:
    """Refuse a column of splits that holds other values too, or rows of a split that is there beside its table."""
    names, shown = [*chosen], source.split_column or column
    strangers = [name for name in names if name not in split_kinds(names)]
    train, other, *_ = sorted(names, key=lambda name: -int(chosen[name].sum()))
    beside = [name for name in source.splits if name != own]
    if strangers and not named & set(names):
        unused = "" if own in names else f"; if they are no splits, give `train_split={own}`"
        use = f"name those that you use: `train_split={train}` `eval_split={other}`{unused}"
        if beside:
            use = f"name the splits as they are: `train_split={own}` `eval_split={beside[0]}`"
        raise InputError(
            f"Column {shown!r} holds {listed(map(repr, names))}, and no split is called "
            f"{listed(map(repr, strangers))}. Give each row train, validation or test, or {use}."
        )
    for name in names:
        if twice := [each for each in beside if kind_of(each) == kind_of(name)]:
            raise InputError(
                f"Column {shown!r} of {own} holds rows of {name!r}, and there is a split {twice[0]!r} beside it. Move "
                f"these rows there, or name the splits as they are: `train_split={own}` `eval_split={twice[0]}`."
            )


def choose_roles(source: Source, train_split: str | None, eval_split: str | None) -> dict[str, str]:
    """Choose a split for each role; those of an unlabelled name have none."""
    for parameter, name in (("train_split", train_split), ("eval_split", eval_split)):
        if name is not None and name not in source.splits:
            raise InputError(f"`{parameter}={name}`: no such split. Splits: {', '.join(source.splits)}.")
    labeled = [name for name in source.splits if kind_of(name) != UNLABELED]
    train = train_split or choose_split(labeled, TRAIN, "train_split")
    if train is None:
        raise InputError(f"No split to train on. Choose one with `train_split`; splits: {', '.join(source.splits)}.")
    chosen = {TRAIN: train}
    others = [name for name in labeled if name != train]
    if validation := eval_split or choose_split(others, VALIDATION, "eval_split"):
        chosen[VALIDATION] = validation
    tests = find_splits([name for name in others if name != chosen.get(VALIDATION)], TEST)
    if len(tests) == 1:
        chosen[TEST] = tests[0]
    for name in source.splits:
        if name not in chosen.values():
            _leave_out_split(source, name, "neither train, validation nor test")
    return chosen


def _leave_out_split(source: Source, name: str, reason: str) -> None:
    rows = source.splits[name]
    if not isinstance(rows, Dataset):
        source.notes.append(f"all images of split {name!r} left out: {reason}.")
        source.skipped.append(SkippedImage("all images", name, reason))
        return
    columns = [column for column, feature in rows.features.items() if isinstance(feature, datasets.Image)]
    names = image_names(rows, columns[0]) if columns else [f"row {number}" for number in range(len(rows))]
    source.leave_out(names, name, reason, f"split {name!r}")


def choose_columns(
    source: Source,
    chosen: dict[str, str],
    eval_split: str | None,
    image_column_name: str | None,
    label_column_name: str | None,
) -> tuple[dict[str, Rows], str, str]:
    """Choose the two columns, and leave splits without labels out that nobody named."""
    rows: dict[str, Any] = {name: _resolved(source.splits[name]) for name in dict.fromkeys(chosen.values())}
    features = rows[chosen[TRAIN]].features
    image_column = find_image_column(features, image_column_name)
    label_column = find_label_column(features, label_column_name)
    if image_column == label_column:
        raise InputError(f"Column {image_column!r} cannot hold both the images and the labels.")
    for name, part in list(rows.items()):
        if isinstance(part, Dataset) and not len(part):
            raise InputError(f"Split {name!r} is empty. Choose others with `train_split` and `eval_split`.")
        found = name not in (chosen[TRAIN], eval_split) and _unlabeled(part, label_column)
        if found:
            _leave_out_split(source, name, "no labels")
            del rows[name]
            continue
        find_image_column(part.features, image_column)
        find_label_column(part.features, label_column)
        # Undecoded, so that a broken image fails where it can be skipped, not where rows are read.
        rows[name] = part.select_columns([image_column, label_column]).cast_column(
            image_column, datasets.Image(decode=False)
        )
    return rows, image_column, label_column


def _resolved(rows: Rows) -> Rows:
    # Those of a generator or of WebDataset's archives show in the first rows only.
    return rows if rows.features else rows._resolve_features()


def _unlabeled(rows: Rows, label_column: str) -> bool:
    if label_column not in rows.features:
        return True
    return isinstance(rows, Dataset) and count_missing(rows, label_column) == len(rows)
