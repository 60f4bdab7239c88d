"""The options that say which images are trained and evaluated on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..data import AUGMENTATIONS, LAYOUTS, Splits, balanced_class_weights, load_splits
from ..errors import InputError
from ..training_args import option

# What [`load_splits`] takes beside the options of [`split_dataset`]; and what they and [`build_datasets`] take.
_SOURCE = ("dataset_name", "dataset_config_name", "data_dir", "data_layout", "max_unzipped_gb", "streaming")
_SPLIT = (
    *("image_column_name", "label_column_name", "train_split", "eval_split", "test_fraction"),
    *("max_train_samples", "max_eval_samples", "images_per_class"),
)
_BUILD = ("augmentation", "mixup_alpha", "cutmix_alpha", "image_cache_gb")


@dataclass
class DataArguments:
    """Say which images are trained and evaluated on, and what is done to them."""

    dataset_name: str | None = option(None, "An id on the Hub or a dataset's folder.")
    dataset_config_name: str | None = option(None, "The dataset's configuration.")
    data_dir: str | None = option(
        None, "Folders of images: one a class, or train/, validation/ and test/ with one a class."
    )
    data_layout: str = option("auto", "What the folders of data_dir are; auto finds it out.", *LAYOUTS)
    max_unzipped_gb: float | None = option(
        None, "Unpack a zip file to so many GB at most; by default 100 times its size."
    )
    image_column_name: str | None = option(None, "The column of the images.")
    label_column_name: str | None = option(None, "The column of the labels.")
    train_split: str | None = option(None, 'The split to train on; "train" by default.')
    eval_split: str | None = option(None, "The split to evaluate on during training; validation by default.")
    test_fraction: float = option(0.15, "Fraction of each class set aside where there is no validation split.")
    max_train_samples: int | None = option(None, "Train on so many images at most.")
    max_eval_samples: int | None = option(None, "Evaluate on so many images at most.")
    images_per_class: int | None = option(None, "Train on so many images of each class at most.")
    augmentation: str = option("flip", "What is done to training images.", *AUGMENTATIONS)
    mixup_alpha: float = option(0.0, "Blend each image with another, weighted by Beta(α, α); 0 is off.")
    cutmix_alpha: float = option(0.0, "Put a box of another image into each, its area from Beta(α, α); 0 is off.")
    class_weights: str = option("none", "balanced: weight rare classes up.", "none", "balanced")
    streaming: bool = option(False, "Keep nothing of --dataset_name on disk; --max_steps says when to end.")
    image_cache_gb: float = option(32.0, "Disk space for prepared images; 0 decodes each in every epoch.")

    def __post_init__(self) -> None:
        if not 0 <= self.image_cache_gb < math.inf:
            raise InputError(
                f"`image_cache_gb={self.image_cache_gb}` must be 0, which keeps nothing, or more: try "
                "`image_cache_gb=32`."
            )

    def load(self, seed: int, num_labels: int | None = None) -> Splits:
        """Load the images: see [`load_splits`]. Streams whose classes have no names need their number."""
        return load_splits(num_labels=num_labels, **self._values(_SOURCE), **self.split_options(seed))

    def split_options(self, seed: int) -> dict[str, Any]:
        """Give what [`split_dataset`] takes."""
        return self._values(_SPLIT) | {"seed": seed}

    def build_options(self, seed: int) -> dict[str, Any]:
        """Give what [`build_datasets`] takes."""
        return self._values(_BUILD) | {"seed": seed}

    def _values(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def loss_weights(self, train: Any) -> Tensor | None:
        """Weight the classes of the training split, if that was asked for."""
        if self.class_weights != "balanced":
            return None
        if self.streaming:
            raise InputError("Class weights can't be measured on a stream: leave `class_weights=balanced` out.")
        return balanced_class_weights(train.labels, train.pipeline.num_classes)
