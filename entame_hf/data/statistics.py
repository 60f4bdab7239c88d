"""Measure the colours of a dataset."""

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import BaseImageProcessor

from ..errors import InputError
from .dataset import IGNORED_LABEL, ClassificationDataset
from .transforms import evaluation_transform, set_normalization


def channel_statistics(
    dataset: ClassificationDataset, processor: BaseImageProcessor, num_workers: int = 0
) -> tuple[list[float], list[float]]:
    """Measure mean and standard deviation of each channel over all pixels of a training part.

    Images are resized as for evaluation; those that can't be read are skipped.

    Args:
        dataset ([`ClassificationDataset`]):
            The training part; its own transform is not used.
        processor ([`~transformers.BaseImageProcessor`]):
            The model's image processor, set to the model's size.
        num_workers (`int`, *optional*, defaults to 0):
            Processes that decode; 0 decodes in this one.

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
    plain = set_normalization(processor, mean=[0.0] * 3, std=[1.0] * 3)
    images = dataset.with_transform(evaluation_transform(plain))
    images.evaluation = True
    loader = DataLoader(images, batch_size=64, num_workers=num_workers, collate_fn=list)
    pixels, total, squares = 0, torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for batch in tqdm(loader, desc="Measuring mean and std", unit="batch"):
        for item in batch:
            if item["labels"] != IGNORED_LABEL:
                values = item["pixel_values"].double().flatten(1)
                pixels += values.shape[1]
                total += values.sum(1)
                squares += values.square().sum(1)
    if not pixels:
        raise InputError("No image can be read: mean and std cannot be measured.")
    mean = total / pixels
    std = (squares / pixels - mean.square()).clamp_min(0).sqrt()
    # A channel without any contrast carries nothing: dividing it by 1 keeps it finite.
    std[std < 1e-6] = 1.0
    return mean.tolist(), std.tolist()
