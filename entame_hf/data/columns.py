"""Find the image and the label column of a dataset, and read labels."""

from __future__ import annotations

import re

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import ClassLabel, Dataset, Features, Image
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InputError
from .splits import SPLIT_COLUMN

_MULTI_LABEL = (
    'For several classes an image, set `model.config.problem_type = "multi_label_classification"` and pass your own '
    "dataset to EntameTrainer; energies are off then."
)


def find_image_column(features: Features, name: str | None = None) -> str:
    """Find the column that holds the images: the named one, else the only one of type `datasets.Image`."""
    if name is not None:
        _require_column(features, name, "image_column_name")
        if not _may_hold_images(features[name]):
            raise InputError(
                f"`image_column_name={name}` holds {features[name]}; allowed are images, bytes, "
                f"{{bytes, path}} and paths. Columns: {', '.join(features)}."
            )
        return name
    candidates = [column for column, feature in features.items() if isinstance(feature, Image)]
    return _only(candidates, features, "image", "image_column_name")


def find_label_column(features: Features, name: str | None = None) -> str:
    """Find the column of labels: the named one, else the only `datasets.ClassLabel`, "label" or "labels"."""
    if name is None:
        candidates = [
            column
            for column, feature in features.items()
            if (isinstance(feature, ClassLabel) and column.casefold() != SPLIT_COLUMN)
            or (column in ("label", "labels") and _may_hold_labels(feature))
        ]
        # The message says what it holds.
        candidates = candidates or [column for column in ("label", "labels") if column in features]
        name = _only(candidates, features, "label", "label_column_name")
    _require_column(features, name, "label_column_name")
    if not _may_hold_labels(features[name]):
        raise InputError(
            f"Label column {name!r} holds {features[name]}; allowed: ClassLabel, string, integer, boolean, or one "
            f"number a class. Name another with `label_column_name`; columns: {', '.join(features)}."
        )
    return name


def image_files(dataset: Dataset, column: str) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Give the length of each image's bytes, null where it lies in a file, and its path, without copying an image."""
    # Of the whole table, as it lies on disk: choosing rows would copy the images that are in it.
    images = dataset.data.column(column)
    found = pc.binary_length(pc.struct_field(images, "bytes")), pc.struct_field(images, "path")
    if dataset._indices is not None:
        found = tuple(values.take(dataset._indices.column(0)) for values in found)
    return found


def image_names(dataset: Dataset, column: str, rows: NDArray[np.int64] | None = None) -> list[str]:
    """Name images by their paths, or by their rows in the table that they come from."""
    rows = np.arange(len(dataset)) if rows is None else rows
    paths = image_files(dataset, column)[1].take(pa.array(rows)).to_pylist()
    return [path or f"row {row_number(dataset, row)}" for path, row in zip(paths, rows.tolist(), strict=True)]


def row_number(dataset: Dataset, row: int) -> int:
    """Give a row's number in the table that a dataset's rows were chosen from."""
    return row if dataset._indices is None else dataset._indices.column(0)[row].as_py()


def label_values(dataset: Dataset, column: str) -> pa.ChunkedArray:
    """Give a column as Arrow holds it, without touching the images beside it."""
    return dataset.select_columns([column]).with_format("arrow")[:].column(column)


def may_name(feature: object) -> bool:
    """Tell whether a column may hold names, such as those of splits."""
    return isinstance(feature, ClassLabel) or _is_value(feature, r"u?int\d+|(large_)?string|bool")


def named_rows(dataset: Dataset, column: str) -> tuple[list[str], NDArray[np.int64]]:
    """Read a column as text: its different values, in the order of their first rows, and which one each row has."""
    values, names = label_values(dataset, column), getattr(dataset.features[column], "names", None)
    different = pc.unique(values)
    shown = [str(v) if names is None or v is None else names[v] for v in different.to_pylist()]
    return shown, pc.index_in(values, value_set=different).to_numpy().astype(np.int64)


def label_indices(dataset: Dataset, column: str) -> NDArray[np.int64]:
    """Read class indices: int64 (N,); of rows that hold shares of classes, the index of the largest."""
    shares = label_shares(dataset, column)
    if shares is not None:
        return shares.argmax(1)
    values = label_values(dataset, column)
    if values.null_count:
        raise InputError(f"{values.null_count:,} of {len(values):,} rows have no label in column {column!r}.")
    if not (pa.types.is_integer(values.type) or pa.types.is_boolean(values.type)):
        raise InputError(
            f"Column {column!r} holds {values.type} and no class indices. Turn it into a `datasets.ClassLabel` with "
            f"`dataset.class_encode_column({column!r})`."
        )
    return values.to_numpy().astype(np.int64)


def label_shares(dataset: Dataset, column: str, split: str = "train") -> NDArray[np.float32] | None:
    """Read rows of one number a class that sum to 1: float32 (N, C); `None` for a column of another kind."""
    if not is_list(dataset.features[column]):
        return None
    values = label_values(dataset, column)
    lengths = pc.unique(pc.list_value_length(values)).to_pylist()
    flat = pc.list_flatten(values)
    where = f"Column {column!r} of split {split!r}"
    if len(lengths) != 1 or not lengths[0] or flat.null_count:
        raise InputError(
            f"{where} holds lists of different lengths. Allowed: one class, or one number a class. {_MULTI_LABEL}"
        )
    shares = flat.cast(pa.float32()).to_numpy().reshape(len(values), lengths[0])
    wrong = np.flatnonzero(~(np.isclose(shares.sum(1), 1, atol=1e-3) & (shares >= 0).all(1)))
    if len(wrong):
        raise InputError(
            f"{where} is not one class an image: row {wrong[0]} sums to {shares[wrong[0]].sum():g}, and rows of "
            f"shares sum to 1, without negative ones. {_MULTI_LABEL}"
        )
    return shares


def count_classes(feature: object, column: str, count: int | None = None) -> int:
    """Count the classes of a label column: `count` if it is given, else those that its `ClassLabel` names."""
    if count is None and is_list(feature) and feature.length > 0:  # type: ignore[attr-defined]
        return feature.length  # type: ignore[attr-defined]
    if count is None and not isinstance(feature, ClassLabel):
        raise InputError(f"Column {column!r} names no classes. Say how many there are: num_classes=10.")
    return feature.num_classes if count is None else count  # type: ignore[attr-defined]


def check_labels(labels: Tensor, count: int, column: str) -> None:
    """Make sure that labels are class indices: on a GPU, others end the process without a word of them."""
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < count:
        wrong = int(labels.max() if labels.max() >= count else labels.min())
        raise InputError(
            f"Column {column!r} has the label {wrong}, but {count} classes are numbered 0 to {count - 1}."
        )


def _require_column(features: Features, name: str, parameter: str) -> None:
    if name not in features:
        raise InputError(f"`{parameter}={name}`: no such column. Columns: {', '.join(features)}.")


def _only(candidates: list[str], features: Features, what: str, parameter: str) -> str:
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise InputError(f"No {what} column found. Name it with `{parameter}`; columns: {', '.join(features)}.")
    raise InputError(
        f"Several columns could hold the {what}: {', '.join(candidates)}. Choose one: `{parameter}={candidates[0]}`."
    )


def _may_hold_images(feature: object) -> bool:
    if isinstance(feature, dict):
        return {"bytes", "path"} <= feature.keys()
    return isinstance(feature, Image) or _is_value(feature, r"(large_)?(binary|string)")


def _may_hold_labels(feature: object) -> bool:
    return isinstance(feature, ClassLabel) or is_list(feature) or _is_value(feature, r"u?int\d+|(large_)?string|bool")


def is_list(feature: object) -> bool:
    """Tell whether a column holds one number a class and image."""
    lists = datasets.List | datasets.LargeList
    return isinstance(feature, lists) and _is_value(feature.feature, r"u?int\d+|float\d+|bool")


def _is_value(feature: object, types: str) -> bool:
    return isinstance(feature, datasets.Value) and bool(re.fullmatch(types, feature.dtype))


def balanced_class_weights(labels: Tensor, num_classes: int) -> Tensor:
    """Weigh classes against their frequency: float32 (C,), N / (C · images of the class); 0 for those without images.

    C are the classes that have images: each counts alike, and an example 1 on average.
    """
    counts = torch.bincount(labels, minlength=num_classes).float()
    weights = counts.sum() / (counts > 0).sum() / counts
    return torch.where(counts > 0, weights, 0.0)


def stratified_rows(labels: Tensor, count: int, seed: int) -> list[int]:
    """Choose `count` rows at random so that classes keep their proportions, in ascending order.

    `labels` are int64 (N,), or float (N, C) shares of classes.
    """
    if labels.ndim == 2:
        labels = labels.argmax(1)
    if len(labels) <= count:
        return list(range(len(labels)))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    by_class = order[labels[order].argsort(stable=True)]
    # Evenly spaced among rows that are ordered by class.
    return by_class[torch.arange(count) * len(labels) // count].sort().values.tolist()
