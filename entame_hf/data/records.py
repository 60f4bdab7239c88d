"""Turn images into records of equal length, and batches of records into a model's input on any device."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ..batches import single_threaded
from .augmentation import Augmentation, Rows
from .images import decode_image, decode_pixels
from .preparation import Preparation

Record = NDArray[np.uint8]
# A record ends with the ratio of width to height that the image had: never zero.
_TAIL = 4


@dataclass
class RawBatch:
    """Hold N images and labels as they leave the host.

    Attributes:
        records (`torch.Tensor`): uint8 (N, length): prepared pixels, and the ratio of width to height.
        labels (`torch.Tensor`): int64 (N,).
        rows (`numpy.ndarray`): int64 (N,), what augmentations are drawn for.
        epoch (`int`): likewise.
    """

    records: Tensor
    labels: Tensor
    rows: Rows
    epoch: int


class Recorder:
    """Make records of images, and a model's input of records.

    Args:
        preparation ([`Preparation`]): what is done to each image before it is kept.
        augmentation ([`Augmentation`], *optional*): what is done to images in training; by default nothing.
        num_classes (`int`): the number of classes.
    """

    def __init__(self, preparation: Preparation, augmentation: Augmentation | None, num_classes: int):
        self.preparation, self.augmentation, self.num_classes = preparation, augmentation, num_classes
        height, width = preparation.size
        self.length = 3 * height * width * preparation.dtype.itemsize + _TAIL

    def record(self, value: Any) -> Record:
        """Decode and prepare one image.

        Args:
            value: as for [`decode_image`].

        Returns:
            `numpy.ndarray`: uint8 (length,).

        Raises:
            UnreadableImageError: If it can't be decoded.
        """
        image = decode_pixels(value) if self.preparation.takes_tensors else decode_image(value)
        width, height = image.size if isinstance(image, Image.Image) else image.shape[:0:-1]
        record = np.empty(self.length, np.uint8)
        record[:-_TAIL] = self.preparation(image).contiguous().numpy().reshape(-1).view(np.uint8)
        record[-_TAIL:] = np.array([width / height], np.float32).view(np.uint8)
        return record

    def finish(self, batch: RawBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Augment and normalise a batch on a device.

        Args:
            batch ([`RawBatch`]): the batch, on the host.
            device (`torch.device`, *optional*): where it goes.

        Returns:
            `dict[str, torch.Tensor]`: `pixel_values`, float32 (N, 3, H, W), and `labels`: int64 (N,), or float32
            (N, classes) where the augmentation mixes images.
        """
        ratios = batch.records[:, -_TAIL:].contiguous().view(torch.float32).flatten()
        records = batch.records.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        pixels = records[:, :-_TAIL].view(self.preparation.dtype).unflatten(1, (3, *self.preparation.size))
        augmentation = self.augmentation
        if augmentation:
            pixels = augmentation(pixels, ratios, self.preparation.output_size, batch.rows, batch.epoch)
        values = torch.addcmul(self.preparation.shift.to(device), pixels, self.preparation.scale.to(device))
        if augmentation and augmentation.mixes:
            values, labels = augmentation.mix(values, labels, self.num_classes, batch.rows, batch.epoch)
        return {"pixel_values": values, "labels": labels}


def threads() -> ThreadPoolExecutor:
    """Give this process's threads for decoding, one a core that is its own, those of other ranks left to them."""
    return _threads(os.getpid())


# A process that was forked has none of its parent's threads.
@cache
def _threads(process: int) -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return ThreadPoolExecutor(max(1, cores // ranks), "decode", initializer=single_threaded)
