"""The options that say which images are trained and evaluated on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..data import AUGMENTATIONS, LAYOUTS, Splits, balanced_class_weights, load_splits
from ..errors import InputError


@dataclass
class DataArguments:
    """Say which images are trained and evaluated on, and what is done to them."""

    dataset_name: str | None = field(default=None, metadata={"help": "An id on the Hub or a dataset's folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folders of images: one a class, or train/, validation/ and test/ with one a class."},
    )
    data_layout: str = field(
        default="auto",
        metadata={"help": "What the folders of data_dir are; auto finds it out.", "choices": list(LAYOUTS)},
    )
    max_unzipped_gb: float | None = field(
        default=None, metadata={"help": "Unpack a zip file to so many GB at most; by default 100 times its size."}
    )
    image_column_name: str | None = field(default=None, metadata={"help": "The column of the images."})
    label_column_name: str | None = field(default=None, metadata={"help": "The column of the labels."})
    train_split: str | None = field(default=None, metadata={"help": 'The split to train on; "train" by default.'})
    eval_split: str | None = field(
        default=None, metadata={"help": "The split to evaluate on during training; validation by default."}
    )
    test_fraction: float = field(
        default=0.15, metadata={"help": "Fraction of each class set aside where there is no validation split."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many images at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many images at most."})
    images_per_class: int | None = field(
        default=None, metadata={"help": "Train on so many images of each class at most."}
    )
    augmentation: str = field(
        default="flip", metadata={"help": "What is done to training images.", "choices": list(AUGMENTATIONS)}
    )
    mixup_alpha: float = field(
        default=0.0, metadata={"help": "Blend each image with another, weighted by Beta(α, α); 0 is off."}
    )
    cutmix_alpha: float = field(
        default=0.0, metadata={"help": "Put a box of another image into each, its area from Beta(α, α); 0 is off."}
    )
    class_weights: str = field(
        default="none", metadata={"help": "balanced: weight rare classes up.", "choices": ["none", "balanced"]}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Keep nothing of --dataset_name on disk; --max_steps says when to end."}
    )
    image_cache_gb: float = field(
        default=32.0, metadata={"help": "Disk space for prepared images; 0 decodes each in every epoch."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.image_cache_gb < math.inf:
            raise InputError(
                f"`image_cache_gb={self.image_cache_gb}` must be 0, which keeps nothing, or more: try "
                "`image_cache_gb=32`."
            )

    def load(self, seed: int, num_labels: int | None = None) -> Splits:
        """Load the images: see [`load_splits`]. Streams whose classes have no names need their number."""
        return load_splits(
            dataset_name=self.dataset_name,
            dataset_config_name=self.dataset_config_name,
            data_dir=self.data_dir,
            data_layout=self.data_layout,
            max_unzipped_gb=self.max_unzipped_gb,
            streaming=self.streaming,
            num_labels=num_labels,
            **self.split_options(seed),
        )

    def split_options(self, seed: int) -> dict[str, Any]:
        """Give what [`split_dataset`] takes."""
        return {
            "image_column_name": self.image_column_name,
            "label_column_name": self.label_column_name,
            "train_split": self.train_split,
            "eval_split": self.eval_split,
            "test_fraction": self.test_fraction,
            "max_train_samples": self.max_train_samples,
            "max_eval_samples": self.max_eval_samples,
            "images_per_class": self.images_per_class,
            "seed": seed,
        }

    def build_options(self, seed: int) -> dict[str, Any]:
        """Give what [`build_datasets`] takes."""
        return {
            "augmentation": self.augmentation,
            "mixup_alpha": self.mixup_alpha,
            "cutmix_alpha": self.cutmix_alpha,
            "image_cache_gb": self.image_cache_gb,
            "seed": seed,
        }

    def loss_weights(self, train: Any) -> Tensor | None:
        """Weight the classes of the training split, if that was asked for."""
        if self.class_weights != "balanced":
            return None
        if self.streaming:
            raise InputError("Class weights can't be measured on a stream: leave `class_weights=balanced` out.")
        return balanced_class_weights(train.labels, train.pipeline.num_classes)
