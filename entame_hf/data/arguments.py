"""The options of a script that trains on images, and the datasets that they ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import BaseImageProcessor

from ..errors import InputError
from .augmentation import AUGMENTATIONS, Augmentation
from .channel_statistics import channel_statistics
from .columns import balanced_class_weights
from .dataset import ClassificationDataset
from .preparation import Preparation
from .sources import Splits, check_limits, load_splits
from .streaming import StreamingDataset, load_streams
from .transforms import set_normalization


@dataclass
class DataArguments:
    """Say which images are trained and evaluated on, and what is done to them."""

    dataset_name: str | None = field(default=None, metadata={"help": "An id on the Hub or a dataset's folder."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folders of images: one a class, or train/, validation/ and test/ with one a class."},
    )
    image_column_name: str | None = field(default=None, metadata={"help": "The column of the images."})
    label_column_name: str | None = field(default=None, metadata={"help": "The column of the labels."})
    train_split: str | None = field(default=None, metadata={"help": 'The split to train on; "train" by default.'})
    eval_split: str | None = field(
        default=None, metadata={"help": 'The split to evaluate on; "validation", else "test", by default.'}
    )
    test_fraction: float = field(
        default=0.15, metadata={"help": "Share of each class set aside where no split is there to evaluate on."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on so many images at most."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on so many images at most."})
    augmentation: str = field(
        default="flip", metadata={"help": "What is done to training images.", "choices": list(AUGMENTATIONS)}
    )
    mixup_alpha: float = field(
        default=0.0, metadata={"help": "Blend each image with another by a share from Beta(α, α); 0 is off."}
    )
    cutmix_alpha: float = field(
        default=0.0, metadata={"help": "Put a box of another image into each, its area from Beta(α, α); 0 is off."}
    )
    class_weights: str = field(
        default="none",
        metadata={"help": "balanced: classes count alike in the loss, rare or not.", "choices": ["none", "balanced"]},
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
                f"--image_cache_gb {self.image_cache_gb} must be 0, which keeps nothing, or more: try 32."
            )

    def load(self, seed: int, num_labels: int | None = None) -> Splits:
        """Load the images: see [`load_splits`], and [`load_streams`], which alone needs the number of classes."""
        where: dict[str, Any] = {"dataset_name": self.dataset_name, "dataset_config_name": self.dataset_config_name}
        options = self.split_options(seed)
        if self.streaming:
            if self.data_dir:
                raise InputError("--streaming reads --dataset_name alone: leave --data_dir out, or --streaming.")
            check_limits(self.max_train_samples, self.max_eval_samples)
            return load_streams(**where, **options, num_labels=num_labels)
        return load_splits(**where, data_dir=self.data_dir, **options)

    def loss_weights(self, train: ClassificationDataset) -> Tensor | None:
        """Weigh the classes of the training part, if that was asked for."""
        if self.class_weights != "balanced":
            return None
        return balanced_class_weights(train.labels, train.recorder.num_classes)

    def split_options(self, seed: int) -> dict[str, Any]:
        """Give what [`split_dataset`] takes."""
        return {
            "image_column": self.image_column_name,
            "label_column": self.label_column_name,
            "train_split": self.train_split,
            "eval_split": self.eval_split,
            "test_fraction": self.test_fraction,
            "max_train_samples": self.max_train_samples,
            "max_eval_samples": self.max_eval_samples,
            "seed": seed,
        }


def build_datasets(
    splits: Splits, processor: BaseImageProcessor, options: DataArguments, seed: int, own_statistics: bool = False
) -> tuple[Any, Any, BaseImageProcessor]:
    """Build what a trainer trains and evaluates on.

    Args:
        splits ([`Splits`]): the parts.
        processor ([`~transformers.BaseImageProcessor`]): the model's image processor, set to its size.
        options ([`DataArguments`]): what is done to images.
        seed (`int`): decides how images are augmented.
        own_statistics (`bool`, *optional*, defaults to `False`): normalise with the training part's mean and std.

    Returns:
        `tuple`: the dataset to train on, the one to evaluate on (each a [`ClassificationDataset`] or, streamed, a
        [`StreamingDataset`]), and the processor that goes with the model.

    Raises:
        InputError: If an option is off, or the processor can't do what is asked.
    """
    augmentation = Augmentation(options.augmentation, options.mixup_alpha, options.cutmix_alpha, seed)
    columns = (splits.image_column, splits.label_column)
    preparation = Preparation(processor, exact=False, whole=augmentation.crops)
    augmentation.check(preparation.dtype)
    if options.streaming:
        if own_statistics or options.class_weights == "balanced":
            raise InputError("Mean, std and class weights can't be measured on a stream: leave these options out.")
        classes = len(splits.class_names)
        streamed = StreamingDataset(splits.train, *columns, preparation, augmentation, classes, seed=seed)
        held = StreamingDataset(
            splits.evaluation, *columns, Preparation(processor), None, classes, "evaluation", evaluation=True
        )
        return streamed, held, processor
    # First, because what fills the disk space for prepared images is the training part.
    evaluation = ClassificationDataset(
        splits.evaluation,
        *columns,
        Preparation(processor),
        name="evaluation",
        evaluation=True,
        cache_gb=options.image_cache_gb,
    )
    train = ClassificationDataset(splits.train, *columns, preparation, augmentation, cache_gb=options.image_cache_gb)
    if own_statistics:
        processor = set_normalization(processor, *channel_statistics(train, processor))
        train, evaluation = train.with_processor(processor), evaluation.with_processor(processor)
    return train, evaluation, processor
