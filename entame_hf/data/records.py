"""Turn images into records of equal length, and batches of records into a model's input on any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from .augmentation import Augmentation, Rows
from .batches import to_device
from .framing import Framing
from .images import UnreadableImageError, decode_image, decode_pixels, encoded_bytes
from .jpeg import common_jpeg, decode_on_gpu
from .preparation import Preparation
from .resampling import crop_and_resize
from .workers import threads

Record = NDArray[np.uint8]

# A record ends with the ratio of width to height that the image had: never zero.
_TAIL = 4

# Of a group that is decoded together: with half-precision intermediates, under a gigabyte of the GPU's memory.
_GROUP_PIXELS = 2**26


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
        self._affine: dict[str, tuple[Tensor, Tensor]] = {}
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
        height, width = image.size[::-1] if isinstance(image, Image.Image) else image.shape[1:]
        record = np.empty(self.length, np.uint8)
        record[:-_TAIL] = self.preparation(image).contiguous().numpy().reshape(-1).view(np.uint8)
        record[-_TAIL:] = np.array([width / height], np.float32).view(np.uint8)
        return record

    def try_record(self, value: Any) -> Record | UnreadableImageError:
        """Decode and prepare one image, or give the error."""
        try:
            return self.record(value)
        except UnreadableImageError as error:
            return error

    def records_on_gpu(self, values: list[Any], device: torch.device) -> Iterator[tuple[list[int], NDArray[np.uint8]]]:
        """Decode and prepare many images on a GPU: those that nvJPEG can be trusted with.

        Args:
            values (`list`): each as for [`decode_image`].
            device (`torch.device`): a CUDA device.

        Yields:
            `tuple`: positions in `values`, and uint8 (n, length), their records. What is left out is for
            [`~Recorder.record`].
        """
        framing = self.preparation.framing
        if framing is None:
            return
        files = [file or b"" for file in threads().map(encoded_bytes, values)]
        headers = [common_jpeg(file) for file in files]
        sizes = {i: (h.height, h.width) for i, h in enumerate(headers) if h and h.upright}
        for group in _of_similar_size(sizes):
            images = decode_on_gpu([files[i] for i in group], device)
            if images is not None:
                pixels = _prepare_together(images, framing).flatten(1)
                ratios = torch.tensor([[sizes[i][1] / sizes[i][0]] for i in group], device=device)
                records = torch.cat([pixels, ratios.view(torch.uint8)], dim=1)
                # To pinned memory, many times as fast.
                yield group, torch.empty_like(records, device="cpu", pin_memory=True).copy_(records).numpy()

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
        labels = to_device(batch.labels, torch.device(device))
        pixels = records[:, :-_TAIL].view(self.preparation.dtype).unflatten(1, (3, *self.preparation.size))
        augmentation = self.augmentation
        if augmentation:
            pixels = augmentation(pixels, ratios, self.preparation.output_size, batch.rows, batch.epoch)
        # On a device once: what goes there in each batch is waited for.
        if str(device) not in self._affine:
            self._affine[str(device)] = self.preparation.scale.to(device), self.preparation.shift.to(device)
        scale, shift = self._affine[str(device)]
        values = torch.addcmul(shift, pixels, scale)
        if augmentation and augmentation.mixes:
            values, labels = augmentation.mix(values, labels, self.num_classes, batch.rows, batch.epoch)
        return {"pixel_values": values, "labels": labels}


def _of_similar_size(sizes: dict[int, tuple[int, int]]) -> Iterator[list[int]]:
    """Group images so that each group, padded to its largest, stays small."""
    group: list[int] = []
    height = width = 0
    for i in sorted(sizes, key=lambda i: sizes[i]):
        height, width = max(height, sizes[i][0]), max(width, sizes[i][1])
        if group and (len(group) + 1) * height * width > _GROUP_PIXELS:
            yield group
            group, (height, width) = [], sizes[i]
        group.append(i)
    if group:
        yield group


def _prepare_together(images: list[Tensor], framing: Framing) -> Tensor:
    """Pad images to a batch and cut and resize each as the framing says: uint8 (N, 3, *size)."""
    device = images[0].device
    sizes = torch.tensor([image.shape[1:] for image in images])
    boxes = torch.tensor([framing.box(*size) for size in sizes.tolist()])
    padded = images[0].new_zeros(len(images), 3, *sizes.amax(0).tolist())
    places = [whole[:, :height, :width] for whole, (height, width) in zip(padded, sizes.tolist(), strict=True)]
    torch._foreach_copy_(places, images)
    given = crop_and_resize(padded, boxes.to(device), framing.size, framing.filter, sizes.to(device))
    return given.round().clamp(0, 255).to(torch.uint8)
