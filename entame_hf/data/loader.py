"""Load splits of images: one loader, with one set of rules, for folders, zip files, the Hub, Parquet and streams."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import Dataset, IterableDataset

from ..errors import InputError
from .duplicates import compare_files
from .folders import holds_tables, open_folder, read_folder
from .labels import encode_labels
from .roles import choose_columns, choose_roles, split_by_column
from .source import Rows, SkippedImage, Source
from .splits import TEST, TRAIN, VALIDATION
from .subsets import EncodedSplits
from .tables import open_dataset, refuse_streaming
from .tree import Folder
from .understanding import Understanding, understand


@dataclass(frozen=True)
class Splits:
    """Hold what a run trains and is evaluated on.

    Attributes:
        train, validation, test (`datasets.Dataset`): Undecoded images and class indices; `test`, which is evaluated
            at the end, may be `None`. All are `datasets.IterableDataset` if streamed.
        class_names (`list[str]`): The name of each class, by its index.
        image_column, label_column (`str`): Their columns.
        understanding ([`Understanding`]): How the dataset was understood.
        skipped (`list[SkippedImage]`): The images that are in no split, and why.
        uncompared (`set[str]`): The splits that `describe` did not compare with train: too many files.
    """

    train: Rows
    validation: Rows
    class_names: list[str]
    image_column: str
    label_column: str
    test: Rows | None = None
    understanding: Understanding = field(default_factory=Understanding)
    skipped: list[SkippedImage] = field(default_factory=list)
    uncompared: set[str] = field(default_factory=set)

    def describe(self) -> str:
        """Say in a few lines how the dataset was understood: see [`Understanding.describe`].

        All files are compared with those of train, byte by byte.
        """
        lines = [self.understanding.describe()]
        for name, rows in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            if isinstance(rows, Dataset) and isinstance(self.train, Dataset):
                found = compare_files(rows, self.train, self.image_column, self.label_column)
                if found is None:
                    self.uncompared.add(name)
                elif note := found.note(name):
                    lines.append(f"Note: {note}")
        if names := ", ".join(sorted(self.uncompared)):
            lines.append(f"Note: images of {names} are compared with those of train at the end: they are many.")
        return "\n".join(lines)


def load_splits(
    *,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    data_dir: str | None = None,
    data_layout: str = "auto",
    max_unzipped_gb: float | None = None,
    streaming: bool = False,
    **options: Any,
) -> Splits:
    """Load the splits of a dataset.

    Args:
        dataset_name (`str`, *optional*): An id on the Hub, or a local folder of Parquet files or images. This or
            `data_dir` is given.
        dataset_config_name (`str`, *optional*): The dataset's configuration.
        data_dir (`str`, *optional*): A folder of images or of Parquet files, or a zip file of images.
        data_layout (`str`, *optional*, defaults to `"auto"`): What folders are: "CLASS", "SPLIT/CLASS" or
            "CLASS/SPLIT".
        max_unzipped_gb (`float`, *optional*): How much a zip file may unpack to; by default 100 times its size.
        streaming (`bool`, *optional*, defaults to `False`): Keep nothing of `dataset_name` on disk.
        options: Which columns and splits, and how many images: what [`split_dataset`] takes.

    Returns:
        [`Splits`]: The splits.

    Raises:
        InputError: If the dataset can't be loaded or can't train a classifier.

    Example:

    ```python
    >>> splits = load_splits(data_dir="pets")
    >>> len(splits.train), len(splits.validation), splits.class_names
    (850, 150, ['cat', 'dog'])
    ```
    """
    check_limits(options)
    if bool(dataset_name) == bool(data_dir):
        where = "`dataset_name` (a Hub id or a dataset's folder) or `data_dir` (images)"
        raise InputError(f"Give either {where}" + (", and not both." if data_dir else "."))
    if streaming and data_dir:
        raise InputError("`streaming` reads `dataset_name` alone: leave `data_dir` out, or `streaming`.")
    name = os.path.expanduser(str(dataset_name or data_dir))
    chosen: Any = {key: options.get(key) for key in ("train_split", "eval_split", "label_column_name")}

    def read_images(root: Folder) -> Source:
        return read_folder(root, **chosen, data_layout=data_layout)

    if data_dir or os.path.exists(name):
        root = open_folder(name, max_unzipped_gb)
        if not holds_tables(root) and (data_dir or root.count):
            if streaming:
                refuse_streaming(name)
            if dataset_config_name:
                raise InputError(
                    f"`dataset_config_name={dataset_config_name}`: {name} is a folder of images, which has no "
                    "configurations. Leave it out."
                )
            return split_dataset(read_images(root), **options)
        name = root.path
    return split_dataset(open_dataset(name, dataset_config_name, streaming, read_images), **options)


def check_limits(options: Mapping[str, Any]) -> None:
    """Refuse numbers of images that leave nothing, and a fraction that is none."""
    fraction = options.get("test_fraction", 0.15)
    if not 0 < fraction < 1:
        raise InputError(f"`test_fraction={fraction}` is outside (0, 1). Give a fraction: `test_fraction=0.15`.")
    for name in ("max_train_samples", "max_eval_samples", "images_per_class"):
        limit = options.get(name)
        if limit is not None and limit < 1:
            raise InputError(f"`{name}={limit}` leaves no image. Give 1 or more, or leave it out.")
    if options.get("images_per_class") and options.get("max_train_samples"):
        raise InputError("Give `images_per_class` or `max_train_samples`, and not both.")


def split_dataset(
    loaded: Source | Mapping[str, Rows] | Rows,
    *,
    image_column_name: str | None = None,
    label_column_name: str | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    test_fraction: float = 0.15,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    images_per_class: int | None = None,
    num_labels: int | None = None,
    seed: int = 42,
) -> Splits:
    """Choose splits, columns and classes of a dataset.

    Args:
        loaded (`datasets.DatasetDict`, `datasets.Dataset` or [`Source`]): Its splits, or its only one; streams too.
        image_column_name (`str`, *optional*): The column of the images; by default the only one that holds images.
        label_column_name (`str`, *optional*): The column of the labels; by default the only `ClassLabel`, else "label"
            or "labels".
        train_split (`str`, *optional*): The split to train on; by default the one whose name means training.
        eval_split (`str`, *optional*): The split to evaluate on during training; by default the one whose name means
            validation ("val", "dev"), else `test_fraction` of the training split. A split whose name means testing is
            for the end of a run. Naming the training split sets this fraction aside too.
        test_fraction (`float`, *optional*, defaults to 0.15): The fraction of each class that is set aside where there
            is no validation split. Training and validation get one image of a class each at least.
        max_train_samples, max_eval_samples (`int`, *optional*): Train or evaluate on so many images at most, of each
            class in proportion.
        images_per_class (`int`, *optional*): Train on so many images of each class at most.
        num_labels (`int`, *optional*): The number of classes of a stream whose labels are integers without names.
        seed (`int`, *optional*, defaults to 42): Decides which images are set aside and drawn.

    Returns:
        [`Splits`]: The splits.

    Raises:
        InputError: If the dataset can't train a classifier.
    """
    limits = {
        "max_train_samples": max_train_samples,
        "max_eval_samples": max_eval_samples,
        "images_per_class": images_per_class,
    }
    check_limits({"test_fraction": test_fraction, **limits})
    source = _as_source(loaded)
    split_by_column(source, {name for name in (train_split, eval_split) if name}, label_column_name)
    chosen = choose_roles(source, train_split, eval_split)
    rows, image_column, label_column = choose_columns(source, chosen, eval_split, image_column_name, label_column_name)
    rows, class_names = encode_labels(rows, label_column, num_labels)
    origins = {role: name for role, name in chosen.items() if name in rows}
    parts: Any = {role: rows[name] for role, name in origins.items()}
    encoded = EncodedSplits(source, origins, image_column, label_column, class_names, seed)
    if isinstance(parts[TRAIN], IterableDataset):
        parts = encoded.limit_streams(encoded.choose_streams(parts), limits)
    else:
        encoded.check_classes(parts)
        parts = encoded.limit_tables(encoded.set_aside(parts, test_fraction), limits)
    parts = {role: parts[role] for role in (TRAIN, VALIDATION, TEST) if role in parts}
    return Splits(
        train=parts[TRAIN],
        validation=parts[VALIDATION],
        class_names=class_names,
        image_column=image_column,
        label_column=label_column,
        test=parts.get(TEST),
        understanding=understand(source, encoded.origins, parts, label_column, class_names),
        skipped=source.skipped,
    )


def _as_source(loaded: Source | Mapping[str, Rows] | Rows) -> Source:
    if isinstance(loaded, Source):
        return replace(loaded, notes=list(loaded.notes), skipped=list(loaded.skipped))
    if isinstance(loaded, Mapping):
        return Source({str(name): rows for name, rows in loaded.items()}, "a dataset in memory")
    return Source({TRAIN: loaded}, "a dataset in memory")
