"""Build the datasets that a trainer takes from loaded splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import datasets
import torch
from tqdm.auto import tqdm
from transformers import BaseImageProcessor

from ..errors import InputError
from .augmentation import Augmentation
from .dataset import ClassificationDataset
from .loader import Splits
from .pipeline import ImagePipeline
from .preparation import Preparation
from .streaming import StreamingDataset
from .transforms import set_normalization


class BuiltDatasets(NamedTuple):
    """Hold what a trainer takes: the datasets, `test` or `None`, and the image processor that goes with the model."""

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
        splits ([`Splits`]): The loaded splits.
        processor ([`~transformers.BaseImageProcessor`]): The model's image processor, set to its size.
        augmentation, mixup_alpha, cutmix_alpha, seed: As for [`Augmentation`].
        image_cache_gb (`float`, *optional*, defaults to 32): Disk space for prepared images; 0 decodes each in every
            epoch.
        own_statistics (`bool`, *optional*, defaults to `False`): Normalise with the training split's mean and standard
            deviation.

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


def channel_statistics(
    dataset: ClassificationDataset, processor: BaseImageProcessor
) -> tuple[list[float], list[float]]:
    """Measure the mean and standard deviation of each channel over all pixels of a training split.

    Images are measured as they are prepared, without augmentation, in the processor's scale; unreadable ones are
    skipped.

    Raises:
        InputError: If no image can be read.
    """
    images = dataset.with_processor(set_normalization(processor, mean=[0.0] * 3, std=[1.0] * 3))
    plain = ImagePipeline(images.pipeline.preparation, None, images.pipeline.num_classes)
    pixels, total, squares = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for start in tqdm(
        range(0, len(dataset), 64), desc="Measuring mean and std", unit="batch", leave=False, disable=None
    ):
        batch = images.read(list(range(start, min(start + 64, len(dataset)))))
        own = ~images.unreadable.flags[batch.rows]
        values = plain.finish(batch)["pixel_values"][own].double().flatten(2)
        pixels += values.shape[0] * values.shape[2]
        total += values.sum((0, 2))
        squares += values.square().sum((0, 2))
    if not pixels:
        raise InputError("No image can be read, so mean and std cannot be measured: use `normalization=model`.")
    mean = total / pixels
    std = (squares / pixels - mean.square()).clamp_min(0).sqrt()
    # Dividing a constant channel by 1 keeps it finite.
    std[std < 1e-6] = 1.0
    return mean.tolist(), std.tolist()
