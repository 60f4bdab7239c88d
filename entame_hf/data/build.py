"""Build the datasets that a trainer takes from loaded splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import datasets
from transformers import BaseImageProcessor

from ..errors import InputError
from .augmentation import Augmentation
from .channel_statistics import channel_statistics
from .dataset import ClassificationDataset
from .loader import Splits
from .preparation import Preparation
from .streaming import StreamingDataset
from .transforms import set_normalization


class BuiltDatasets(NamedTuple):
    """What a trainer takes.

    Attributes:
        train, validation: a [`ClassificationDataset`] each or, streamed, a [`StreamingDataset`].
        test: likewise; `None` if there is no test split to evaluate at the end.
        processor ([`~transformers.BaseImageProcessor`]): the image processor that goes with the model.
    """

    train: Any
    validation: Any
    test: Any
    processor: BaseImageProcessor


def build_datasets(
    splits: Splits,
    processor: BaseImageProcessor,
    *,
    augmentation: str = "flip",
    mixup_alpha: float = 0.0,
    cutmix_alpha: float = 0.0,
    image_cache_gb: float = 32.0,
    seed: int = 42,
    own_statistics: bool = False,
) -> BuiltDatasets:
    """Build what a trainer trains and evaluates on.

    Args:
        splits ([`Splits`]):
            The loaded splits.
        processor ([`~transformers.BaseImageProcessor`]):
            The model's image processor, set to its size.
        augmentation (`str`, *optional*, defaults to `"flip"`), mixup_alpha, cutmix_alpha (`float`, defaults to 0):
            As for [`Augmentation`].
        image_cache_gb (`float`, *optional*, defaults to 32):
            Disk space for prepared images; 0 decodes each in every epoch.
        seed (`int`, *optional*, defaults to 42):
            Decides how images are augmented.
        own_statistics (`bool`, *optional*, defaults to `False`):
            Normalise with the training split's mean and standard deviation.

    Returns:
        [`BuiltDatasets`]: The datasets, and the processor that goes with the model.

    Raises:
        InputError: If an option is off, or the processor can't do what is asked.
    """
    augment = Augmentation(augmentation, mixup_alpha, cutmix_alpha, seed)
    columns = (splits.image_column, splits.label_column)
    preparation = Preparation(processor, exact=False, whole=augment.crops)
    augment.check(preparation.dtype)
    if isinstance(splits.train, datasets.IterableDataset):
        if own_statistics:
            raise InputError("Mean and std can't be measured on a stream: leave `normalization=dataset` out.")
        classes = len(splits.class_names)
        streams: Any = {
            name: StreamingDataset(rows, *columns, Preparation(processor), None, classes, name, evaluation=True)
            for name, rows in (("validation", splits.validation), ("test", splits.test))
            if rows is not None
        }
        stream = StreamingDataset(splits.train, *columns, preparation, augment, classes, seed=seed)
        return BuiltDatasets(stream, streams["validation"], streams.get("test"), processor)
    # First, because the training split is what fills the disk space for prepared images.
    held = {
        name: ClassificationDataset(
            rows, *columns, Preparation(processor), name=name, evaluation=True, cache_gb=image_cache_gb
        )
        for name, rows in (("validation", splits.validation), ("test", splits.test))
        if rows is not None
    }
    train = ClassificationDataset(splits.train, *columns, preparation, augment, cache_gb=image_cache_gb)
    if own_statistics:
        processor = set_normalization(processor, *channel_statistics(train, processor))
        train = train.with_processor(processor)
        held = {name: rows.with_processor(processor) for name, rows in held.items()}
    return BuiltDatasets(train, held["validation"], held.get("test"), processor)
