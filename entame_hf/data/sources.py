"""Load a dataset, from the Hub or from disk, as one part to train on and one to evaluate on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetDict, IterableDataset

from ..errors import InputError
from .columns import encode_labels, find_image_column, find_label_column, label_values
from .folders import load_image_folder


@dataclass(frozen=True)
class Splits:
    """Hold what a run trains and is evaluated on.

    Attributes:
        train (`datasets.Dataset` or `None`):
            The training part; `None` if the dataset has none. Images are undecoded, labels class indices.
        validation (`datasets.Dataset`):
            The split to evaluate on, with the same two columns. Both are `datasets.IterableDataset` if streamed.
        class_names (`list[str]`):
            The name of each class, by its index.
        image_column (`str`):
            The column that holds the images.
        label_column (`str`):
            The column that holds the labels.
        test (`datasets.Dataset`, *optional*):
            The split to evaluate on at the end, if there is one.
    """

    train: Dataset | IterableDataset | None
    validation: Dataset | IterableDataset
    class_names: list[str]
    image_column: str
    label_column: str
    test: Dataset | IterableDataset | None = None


def load_splits(
    *,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    data_dir: str | None = None,
    **options: Any,
) -> Splits:
    """Load the training and the evaluation part of a dataset.

    Args:
        dataset_name (`str`, *optional*):
            An id on the Hub or a local folder, for `datasets.load_dataset`. This or `data_dir` is given.
        dataset_config_name (`str`, *optional*):
            The dataset's configuration.
        data_dir (`str`, *optional*):
            A folder of images, for [`load_image_folder`].
        options:
            Which columns and splits, and how many images: what [`split_dataset`] takes.

    Returns:
        [`Splits`]: The two parts; `train` is `None` where no split is called "train" and none was named.

    Raises:
        InputError: If the dataset can't be loaded or can't train a classifier.

    Example:

    ```python
    >>> splits = load_splits(data_dir="pets")
    >>> len(splits.train), len(splits.validation), splits.class_names
    (850, 150, ['cat', 'dog'])
    ```
    """
    if bool(dataset_name) == bool(data_dir):
        raise InputError("Give either --dataset_name (a Hub id or a dataset's folder) or --data_dir (images).")
    loaded = load_image_folder(data_dir) if data_dir else load_parts(str(dataset_name), dataset_config_name)
    return split_dataset(loaded, **options)


def split_dataset(
    loaded: DatasetDict | Dataset,
    *,
    image_column_name: str | None = None,
    label_column_name: str | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    test_fraction: float = 0.15,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    seed: int = 42,
) -> Splits:
    """Choose the training and the evaluation part of a dataset in memory.

    Args:
        loaded (`datasets.DatasetDict` or `datasets.Dataset`):
            The dataset's splits, or its only one.
        image_column_name (`str`, *optional*):
            The column of the images; by default the only one that holds images.
        label_column_name (`str`, *optional*):
            The column of the labels; by default the only `ClassLabel`, else "label" or "labels".
        train_split (`str`, *optional*):
            The split to train on; by default "train".
        eval_split (`str`, *optional*):
            The split to evaluate on; by default "validation", else "test", else `test_fraction` of the
            training split. Naming the training split sets this fraction of it aside too.
        test_fraction (`float`, *optional*, defaults to 0.15):
            The share of each class that is set aside where no split is there to evaluate on. At least one
            image of a class goes to either part; the only image of a class is trained on.
        max_train_samples (`int`, *optional*):
            Train on so many images at most, drawn at random.
        max_eval_samples (`int`, *optional*):
            Evaluate on so many images at most, drawn at random.
        seed (`int`, *optional*, defaults to 42):
            Decides which images are set aside and drawn.

    Returns:
        [`Splits`]: The two parts.

    Raises:
        InputError: If the dataset can't train a classifier.
    """
    if not 0 < test_fraction < 1:
        raise InputError(f"--test_fraction {test_fraction} is outside (0, 1). Give a share such as 0.15.")
    check_limits(max_train_samples, max_eval_samples)

    if isinstance(loaded, Dataset):
        loaded = DatasetDict(train=loaded)
    train_name, eval_name = choose_splits(loaded, train_split, eval_split)
    names = list(dict.fromkeys(name for name in (train_name, eval_name) if name is not None))

    image_column = find_image_column(loaded[names[0]].features, image_column_name)
    label_column = find_label_column(loaded[names[0]].features, label_column_name)
    if image_column == label_column:
        raise InputError(f"Column {image_column!r} cannot hold both the images and the labels.")
    for name in names:
        find_image_column(loaded[name].features, image_column)
        find_label_column(loaded[name].features, label_column)
        if not len(loaded[name]):
            raise InputError(f"Split {name!r} is empty. Choose others with --train_split and --eval_split.")
    # Undecoded, so that a broken image fails where it can be skipped, not where rows are read.
    parts = {
        name: loaded[name]
        .select_columns([image_column, label_column])
        .cast_column(image_column, datasets.Image(decode=False))
        for name in names
    }
    parts, class_names = encode_labels(parts, label_column)

    train = parts[train_name] if train_name else None
    if train is not None:
        _check_classes(train, parts[eval_name] if eval_name else train, label_column, class_names)
    if eval_name is None or eval_name == train_name:
        assert train is not None
        held_out = _hold_out(_codes(train, label_column), test_fraction, seed)
        if not held_out.any():
            raise InputError("Every class has a single image: none can be set aside. Name an --eval_split.")
        train, evaluation = train.select(np.flatnonzero(~held_out)), train.select(np.flatnonzero(held_out))
    else:
        evaluation = parts[eval_name]
    return Splits(
        train=None if train is None else _draw(train, max_train_samples, seed),
        validation=_draw(evaluation, max_eval_samples, seed),
        class_names=class_names,
        image_column=image_column,
        label_column=label_column,
    )


def check_limits(max_train_samples: int | None, max_eval_samples: int | None) -> None:
    """Refuse limits that leave nothing."""
    for flag, limit in (("--max_train_samples", max_train_samples), ("--max_eval_samples", max_eval_samples)):
        if limit is not None and limit < 1:
            raise InputError(f"{flag} {limit} leaves no image. Give 1 or more, or leave it out.")


def load_parts(name: str, config: str | None, streaming: bool = False) -> Any:
    """Load all splits of a dataset, or say in one line why that can't be."""
    try:
        return datasets.load_dataset(name, config, streaming=streaming)
    # Whatever fails in there (network, permissions, parsing), it is the named dataset that can't be used.
    except Exception as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        reason = shorten(_without_secrets(str(cause or error)) or type(error).__name__, 400, placeholder=" ...")
        command = _without_secrets(f"--dataset_name {name}" + (f" --dataset_config_name {config}" if config else ""))
        raise InputError(
            f"Cannot load {command}: {reason.rstrip('.')}. Give the id of a dataset on the Hub (after "
            "`hf auth login` where it is private) or a local folder, and a --dataset_config_name that it has."
        ) from error


def _without_secrets(text: str) -> str:
    text = re.sub(r"(https?://)[^/\s@]+@", r"\1", text)
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)
    return re.sub(r"hf_[A-Za-z0-9]{16,}", "hf_***", text)


def choose_splits(
    loaded: DatasetDict, train_split: str | None, eval_split: str | None
) -> tuple[str | None, str | None]:
    """Choose the split to train on and the one to evaluate on; `None` where there is none."""
    for flag, name in (("--train_split", train_split), ("--eval_split", eval_split)):
        if name is not None and name not in loaded:
            raise InputError(f"{flag} {name}: no such split. Splits: {', '.join(loaded)}.")
    train = train_split or ("train" if "train" in loaded else None)
    evaluation = eval_split or next((s for s in ("validation", "test") if s in loaded and s != train), None)
    if train is None and evaluation is None:
        raise InputError(f"No split 'train'. Choose one with --train_split; splits: {', '.join(loaded)}.")
    return train, evaluation


def _codes(dataset: Dataset, column: str) -> np.ndarray:
    return label_values(dataset, column).to_numpy()


def _check_classes(train: Dataset, evaluation: Dataset, column: str, names: list[str]) -> None:
    trained = set(np.unique(_codes(train, column)))
    if len(trained) < 2:
        raise InputError(
            f"Column {column!r} has one class only to train on, {names[int(trained.pop())]!r}; a classifier "
            "needs two or more. Name another with --label_column_name."
        )
    unknown = [repr(names[i]) for i in np.unique(_codes(evaluation, column)) if i not in trained]
    if unknown:
        raise InputError(
            f"{len(unknown)} of the classes to evaluate on have no image to train on: "
            f"{shorten(', '.join(unknown), 200, placeholder=' ...')}. Add some, or name another --eval_split."
        )


def _hold_out(codes: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    # scikit-learn's stratified split refuses classes of one image and may leave small ones out of a part.
    generator = np.random.default_rng(seed)
    held_out = np.zeros(len(codes), dtype=bool)
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        count = np.clip(round(len(rows) * fraction), 1, len(rows) - 1) if len(rows) > 1 else 0
        held_out[generator.permutation(rows)[:count]] = True
    return held_out


def _draw(dataset: Dataset, limit: int | None, seed: int) -> Dataset:
    if limit is None or limit >= len(dataset):
        return dataset
    return dataset.select(np.sort(np.random.default_rng(seed).permutation(len(dataset))[:limit]))
