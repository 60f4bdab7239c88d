"""Turn the labels of all splits into the same class indices, matched by the names of classes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, IterableDataset, List, Value
from numpy.typing import NDArray

from ..errors import InputError
from .columns import is_list, label_shares, label_values
from .names import code_points, hint, same_looks
from .source import Rows, listed
from .splits import normal


def encode_labels(
    splits: dict[str, Rows], column: str, num_labels: int | None = None
) -> tuple[dict[str, Rows], list[str]]:
    """Turn the label column of all splits into one `datasets.ClassLabel`, the first split's.

    Text is sorted as text ("10" before "2"), integers as numbers. A `datasets.ClassLabel` keeps its names. Splits
    are matched by the names of their classes in NFC. Rows of one number a class that sum to 1 are shares of classes:
    one-hot rows become class indices, others stay for training and become the index of the largest for evaluation.

    Returns:
        `tuple[dict[str, Rows], list[str]]`: The splits, encoded, and the names of the classes.

    Raises:
        InputError: If a label is missing (None, or -1 in a `datasets.ClassLabel`), if a split has a class that the
            first one lacks, or if names can't be told apart.
    """
    first = next(iter(splits))
    splits = {
        split: _as_shares_or_index(rows, column, split, evaluation=split != first) for split, rows in splits.items()
    }
    for split, rows in splits.items():
        if isinstance(rows, Dataset) and (missing := count_missing(rows, column)):
            raise InputError(
                f"{missing:,} of {len(rows):,} images of split {split!r} have no label in column {column!r}. "
                "Remove them, or choose other splits with `train_split` and `eval_split`."
            )
    names = _names(splits[first], column, num_labels)
    if not isinstance(splits[first].features[column], ClassLabel):
        _refuse_same_looks(names)
    feature = ClassLabel(names=names)
    encoded = {
        split: rows if is_list(rows.features[column]) else recode(rows, column, feature, split, first)
        for split, rows in splits.items()
    }
    return encoded, names


def _names(rows: Rows, column: str, num_labels: int | None) -> list[str]:
    feature = rows.features[column]
    if isinstance(feature, ClassLabel):
        return list(dict.fromkeys(map(normal, feature.names)))
    if is_list(feature):
        return [str(index) for index in range(feature.length)]
    if isinstance(rows, Dataset):
        return list(dict.fromkeys(normal(str(v)) for v in sorted(pc.unique(label_values(rows, column)).to_pylist())))
    if num_labels is not None and isinstance(feature, Value) and feature.dtype.startswith(("int", "uint")):
        return [str(index) for index in range(num_labels)]
    raise InputError(
        f"Column {column!r} doesn't name its classes. Say how many numbers it holds with `num_labels=1000`, or leave "
        "`streaming` out where it holds names."
    )


def _refuse_same_looks(names: list[str]) -> None:
    for group in same_looks(names):
        raise InputError(
            f"Classes that look the same: {' and '.join(map(code_points, group[:3]))}. Name them alike if they are "
            "one, or in other words."
        )


def recode(rows: Rows, column: str, feature: ClassLabel, split: str, first: str) -> Rows:
    """Give labels the indices that another split, called `first`, has for the same names."""
    own = rows.features[column]
    index = {name: i for i, name in enumerate(feature.names)}
    if isinstance(rows, IterableDataset):
        return rows if own == feature else _recode_stream(rows, column, feature, index, split, first)
    values = label_values(rows, column)
    classes = pc.unique(values)
    names = {value: _name(own, value, column) for value in classes.to_pylist()}
    if own == feature:
        return rows
    _refuse_unknown([name for name in names.values() if name is not None], index, split, first)
    # -1 is no label.
    found = pa.array([-1 if name is None else index[name] for name in names.values()], pa.int64())
    codes = found.take(pc.index_in(values, value_set=classes))
    return _with_codes(rows, column, codes.to_numpy(zero_copy_only=False), feature)


def _with_codes(rows: Dataset, column: str, codes: NDArray[np.int64], feature: ClassLabel) -> Dataset:
    """Replace a column by class indices, int64 (N,)."""
    if rows._indices is None:
        return rows.remove_columns(column).add_column(column, codes, feature=feature)
    # Of rows that were chosen, `add_column` would copy the images.
    whole, chosen = copy.copy(rows), rows._indices.column(0).to_numpy()
    whole._indices = None
    of_all = np.full(len(whole), -1)
    of_all[chosen] = codes
    return _with_codes(whole, column, of_all, feature).select(chosen)


def _name(own: object, value: Any, column: str) -> str | None:
    """Give the name of a label, `None` for a missing one, and refuse an index that names no class."""
    if not isinstance(own, ClassLabel):
        return None if value is None else normal(str(value))
    if value is None or value < 0:
        return None
    if value >= own.num_classes:
        raise InputError(
            f"Column {column!r} has the label {value}, and its {own.num_classes} classes ({listed(own.names)}) are "
            "counted from 0. Subtract 1 from labels that are counted from 1, or name all classes in the "
            "`datasets.ClassLabel`."
        )
    return normal(own.names[value])


def _recode_stream(
    rows: IterableDataset, column: str, feature: ClassLabel, index: dict[str, int], split: str, first: str
) -> IterableDataset:
    own = rows.features[column]
    if not isinstance(own, ClassLabel):
        # Numbers without names; indices are checked in each batch.
        return rows.cast_column(column, feature)
    _refuse_unknown([normal(name) for name in own.names], index, split, first)
    features = rows.features.copy()
    features[column] = feature
    return rows.map(_recode_row, fn_kwargs={"column": column, "own": own, "index": index}, features=features)


def _recode_row(row: dict[str, Any], column: str, own: ClassLabel, index: dict[str, int]) -> dict[str, int | None]:
    name = _name(own, row[column], column)
    # -1 and None stay: they are no labels.
    return {column: row[column] if name is None else index[name]}


def _refuse_unknown(names: list[str], index: dict[str, int], split: str, first: str) -> None:
    unknown = sorted(name for name in names if name not in index)
    if unknown:
        raise InputError(
            f"{len(unknown)} of the classes of split {split!r} are not among those of {first!r}: "
            f"{listed(map(repr, unknown))}. {first!r} has {listed(map(repr, index))}.{hint(unknown[0], index)} Name "
            "them alike, remove them, or name another split with `eval_split`."
        )


def count_missing(rows: Dataset, column: str) -> int:
    """Count the rows that have no label."""
    values = label_values(rows, column)
    missing = values.null_count
    if isinstance(rows.features[column], ClassLabel):
        missing += pc.sum(pc.less(values, 0)).as_py() or 0
    return int(missing)


def _as_shares_or_index(rows: Rows, column: str, split: str, evaluation: bool) -> Rows:
    """Turn rows of one number a class into class indices where they are one-hot, or only evaluated on."""
    if not is_list(rows.features[column]):
        return rows
    if isinstance(rows, IterableDataset):
        raise InputError(f"Column {column!r} holds lists. A stream needs one class index an image.")
    shares = label_shares(rows, column, split)
    assert shares is not None
    if evaluation or (shares.max(1) > 1 - 1e-4).all():
        index = ClassLabel(names=[str(i) for i in range(shares.shape[1])])
        return _with_codes(rows, column, shares.argmax(1), index)
    feature = List(Value("float32"), length=shares.shape[1])
    return rows.cast_column(column, feature)
