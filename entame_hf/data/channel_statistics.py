"""Measure the mean and standard deviation of a dataset's channels."""

from __future__ import annotations

import torch
from tqdm.auto import tqdm
from transformers import BaseImageProcessor

from ..errors import InputError
from .dataset import ClassificationDataset
from .pipeline import ImagePipeline
from .transforms import set_normalization

_BATCH = 64


def channel_statistics(
    dataset: ClassificationDataset, processor: BaseImageProcessor
) -> tuple[list[float], list[float]]:
    """Measure the mean and standard deviation of each channel over all pixels of a training split.

    Images are measured as they are prepared, without augmentation; unreadable ones are skipped.

    Args:
        dataset ([`ClassificationDataset`]):
            The training split.
        processor ([`~transformers.BaseImageProcessor`]):
            The image processor it is prepared with.

    Returns:
        `tuple[list[float], list[float]]`: The means and the standard deviations, for [`set_normalization`].
        Values are scaled as the processor scales them, by default to [0, 1].

    Raises:
        InputError: If no image can be read.

    Example:

    ```python
    >>> processor = set_normalization(processor, *channel_statistics(train_dataset, processor))
    ```
    """
    images = dataset.with_processor(set_normalization(processor, mean=[0.0] * 3, std=[1.0] * 3))
    plain = ImagePipeline(images.pipeline.preparation, None, images.pipeline.num_classes)
    pixels, total, squares = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for start in tqdm(
        range(0, len(dataset), _BATCH), desc="Measuring mean and std", unit="batch", leave=False, disable=None
    ):
        batch = images.read(list(range(start, min(start + _BATCH, len(dataset)))))
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
