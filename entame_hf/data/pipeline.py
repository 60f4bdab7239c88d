"""Decode images to pixels of one size, and turn batches of pixels into a model's input on any device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from xxhash import xxh3_64_intdigest

from .augmentation import Augmentation, Rows
from .batches import BatchDataset, to_device
from .images import UnreadableImageError, decode_image, encoded_bytes
from .jpeg import common_jpeg, decode_on_gpu, decode_pixels
from .preparation import Preparation
from .resampling import EvaluationCrop, ResizeCrop, crop_and_resize
from .source import SkippedImage
from .workers import threads

# Limits a batch on the GPU: with float16 intermediates, under a gigabyte of its memory.
_GPU_BATCH_PIXELS = 2**26


class DecodedImage(NamedTuple):
    """Hold an image that is ready to be cached.

    Attributes:
        pixels (`numpy.ndarray`): uint8 (B,), the bytes of its prepared pixels.
        ratio (`float`): width over height before preparation.
        content (`int`): 64-bit hash of its file, 0 if it has none.
    """

    pixels: NDArray[np.uint8]
    ratio: float
    content: int


@dataclass
class HostBatch:
    """Hold N images and labels on the host.

    Attributes:
        pixels (`torch.Tensor`): uint8 (N, B), the bytes of prepared pixels.
        ratios (`torch.Tensor`): float32 (N,), width over height before preparation.
        labels (`torch.Tensor`): int64 (N,).
        rows (`numpy.ndarray`): int64 (N,), which with `epoch` decide the augmentation.
        epoch (`int`): see `rows`.
    """

    pixels: Tensor
    ratios: Tensor
    labels: Tensor
    rows: Rows
    epoch: int


class ImagePipeline:
    """Decode images on the host, and augment and normalise batches of them on a device.

    Args:
        preparation ([`Preparation`]): per-image work.
        augmentation ([`Augmentation`], *optional*): what is done to images in training; by default nothing.
        num_classes (`int`): the number of classes.
        crop ([`EvaluationCrop`], *optional*): for whole images without augmentation.

    Attributes:
        length (`int`): B, the bytes of an image's prepared pixels.
    """

    def __init__(
        self,
        preparation: Preparation,
        augmentation: Augmentation | None,
        num_classes: int,
        crop: EvaluationCrop | None = None,
    ):
        self.preparation, self.augmentation, self.num_classes = preparation, augmentation, num_classes
        self._crop = crop
        height, width = preparation.size
        self.length = 3 * height * width * preparation.dtype.itemsize
        self._affine: dict[str, tuple[Tensor, Tensor]] = {}

    def for_evaluation(self) -> ImagePipeline:
        """Show the same prepared images as evaluation sees them: without augmentation, and whole images cropped."""
        return ImagePipeline(self.preparation, None, self.num_classes, self.preparation.evaluation_crop())

    def decode(self, value: Any) -> DecodedImage | UnreadableImageError:
        """Decode and prepare one image.

        Args:
            value: as for [`decode_image`].

        Returns:
            [`DecodedImage`], or the error if it cannot be decoded or prepared.
        """
        try:
            data = encoded_bytes(value)
            source = value if data is None else data
            image = decode_pixels(source) if self.preparation.takes_tensors else decode_image(source)
            height, width = image.size[::-1] if isinstance(image, Image.Image) else image.shape[1:]
            pixels = self.preparation(image).contiguous().numpy().reshape(-1).view(np.uint8)
            return DecodedImage(pixels, width / height, 0 if data is None else xxh3_64_intdigest(data))
        except UnreadableImageError as error:
            return error
        # One image that a processor cannot take must not end a run; many end it with this reason.
        except Exception as error:
            return UnreadableImageError(f"{type(error).__name__}: {error}")

    def decode_on_gpu(self, values: list[Any], device: torch.device) -> Iterator[tuple[int, DecodedImage]]:
        """Decode and prepare a batch on a GPU, those images that nvJPEG decodes reliably.

        Args:
            values (`list`): each as for [`decode_image`].
            device (`torch.device`): a CUDA device.

        Yields:
            `tuple[int, DecodedImage]`: a position in `values` and its image. [`~ImagePipeline.decode`] takes the rest.
        """
        resize_crop = self.preparation.resize_crop
        if resize_crop is None:
            return
        files = list(threads().map(_read, values))
        headers = [common_jpeg(file) for file in files]
        sizes = {i: (h.height, h.width) for i, h in enumerate(headers) if h and h.upright}
        sizes = {i: size for i, size in sizes.items() if not self.preparation.is_long(*size)}
        for group in _of_similar_size(sizes):
            images = decode_on_gpu([files[i] for i in group], device)
            if images is None:
                continue
            pixels = _prepare_batch(images, resize_crop).flatten(1)
            # Copies to pinned memory are many times as fast.
            host = torch.empty_like(pixels, device="cpu", pin_memory=True).copy_(pixels).numpy()
            for i, own in zip(group, host, strict=True):
                height, width = sizes[i]
                yield i, DecodedImage(own, width / height, xxh3_64_intdigest(files[i]))

    def finish(self, batch: HostBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Augment and normalise a batch on a device.

        Args:
            batch ([`HostBatch`]): the batch.
            device (`torch.device`, *optional*): where it goes.

        Returns:
            `dict[str, torch.Tensor]`: `pixel_values`, float32 (N, 3, H, W), and `labels`: int64 (N,), or float32
            (N, classes) if the augmentation mixes images or the dataset holds shares of classes.
        """
        pixels = batch.pixels.to(device, non_blocking=True)
        labels = to_device(batch.labels, torch.device(device))
        pixels = pixels.view(self.preparation.dtype).unflatten(1, (3, *self.preparation.size))
        augmentation = self.augmentation
        if augmentation:
            pixels = augmentation(pixels, batch.ratios, self.preparation.output_size, batch.rows, batch.epoch)
        elif self._crop:
            pixels = self._crop(pixels, batch.ratios, self.preparation.output_size)
        # Once a device: the host waits for a copy in each batch.
        if str(device) not in self._affine:
            self._affine[str(device)] = self.preparation.scale.to(device), self.preparation.shift.to(device)
        scale, shift = self._affine[str(device)]
        values = torch.addcmul(shift, pixels, scale)
        if augmentation and augmentation.mixes:
            values, labels = augmentation.mix(values, labels, self.num_classes, batch.rows, batch.epoch)
        return {"pixel_values": values, "labels": labels}


class PipelineDataset(BatchDataset):
    """Finish batches by an [`ImagePipeline`], and name the images that cannot be read.

    Attributes:
        pipeline ([`ImagePipeline`]): decodes and finishes images.
        unreadable ([`UnreadableRows`] or [`UnreadableNames`]): the images that cannot be read.
        name (`str`): what messages call this dataset.
    """

    pipeline: ImagePipeline
    unreadable: Any
    name: str

    def finish(self, batch: HostBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Augment and normalise a batch on a device: see [`ImagePipeline.finish`]."""
        return self.pipeline.finish(batch, device)

    def summary(self) -> str | None:
        """Name the unreadable images in one line; `None` if there are none so far."""
        return self.unreadable.summary()

    def gather_unreadable(self) -> None:
        """Add what other ranks could not read. To be called in all of them."""
        self.unreadable.gather()

    def skipped(self) -> list[SkippedImage]:
        """List the unreadable images with their reasons, of all ranks as last gathered."""
        return self.unreadable.skipped(self.name)


def _read(value: Any) -> bytes:
    try:
        return encoded_bytes(value) or b""
    except UnreadableImageError:
        return b""


def _of_similar_size(sizes: dict[int, tuple[int, int]]) -> Iterator[list[int]]:
    """Group images so that each group, padded to its largest, stays small."""
    group: list[int] = []
    height = width = 0
    for i in sorted(sizes, key=lambda i: sizes[i]):
        height, width = max(height, sizes[i][0]), max(width, sizes[i][1])
        if group and (len(group) + 1) * height * width > _GPU_BATCH_PIXELS:
            yield group
            group, (height, width) = [], sizes[i]
        group.append(i)
    if group:
        yield group


def _prepare_batch(images: list[Tensor], resize_crop: ResizeCrop) -> Tensor:
    """Pad images to a batch, crop and resize each: uint8 (N, 3, *size)."""
    device = images[0].device
    sizes = torch.tensor([image.shape[1:] for image in images])
    boxes = torch.tensor([resize_crop.box(*size) for size in sizes.tolist()])
    padded = images[0].new_zeros(len(images), 3, *sizes.amax(0).tolist())
    views = [image[:, :height, :width] for image, (height, width) in zip(padded, sizes.tolist(), strict=True)]
    torch._foreach_copy_(views, images)
    resized = crop_and_resize(padded, boxes.to(device), resize_crop.size, resize_crop.filter, sizes.to(device))
    return resized.round().clamp(0, 255).to(torch.uint8)
