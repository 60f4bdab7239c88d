"""Decode images to pixels of one size, and turn batches of pixels into a model's input on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from xxhash import xxh3_64_intdigest

from .augmentation import Augmentation, Rows
from .batches import BatchDataset, to_device
from .images import DecodedImage, EncodedImage, UnreadableImageError, decode_image, encoded_bytes
from .jpeg import common_jpeg, decode_on_gpu, decode_pixels, gpu_decoder
from .preparation import Preparation
from .resampling import EvaluationCrop, ResizeCrop, crop_and_resize
from .source import SkippedImage
from .workers import Read, Rest, Workers, in_threads

# Limits a batch on the GPU: with float16 intermediates, under a gigabyte of its memory.
_GPU_BATCH_PIXELS = 2**26


# Takes decoded images by their numbers.
Keep = Callable[[Mapping[int, DecodedImage]], Any]


@dataclass
class HostBatch:
    """Hold N images and labels on the host.

    Attributes:
        pixels (`torch.Tensor`): uint8 (N, B), the bytes of prepared pixels, channels last.
        ratios (`torch.Tensor`): float32 (N,), width over height before preparation.
        labels (`torch.Tensor`): int64 (N,).
        rows (`numpy.ndarray`): int64 (N,), which with `epoch` decide the augmentation.
        epoch (`int`): see `rows`.
        on_device (`tuple`, *optional*): positions of images that a GPU decoded, and their pixels there, uint8 (M, B).
    """

    pixels: Tensor
    ratios: Tensor
    labels: Tensor
    rows: Rows
    epoch: int
    on_device: tuple[Rows, Tensor] | None = None

    @classmethod
    def allocate(cls, rows: Rows, length: int, epoch: int, device: torch.device | None) -> HostBatch:
        """Allocate a batch for images of `length` bytes that goes to a device."""
        # CUDA copies from pinned memory without waiting.
        pinned = device is not None and device.type == "cuda"
        pixels = torch.empty(len(rows), length, dtype=torch.uint8, pin_memory=pinned)
        return cls(pixels, torch.empty(len(rows)), torch.empty(0), rows, epoch)

    def pixels_on(self, device: torch.device) -> Tensor:
        """Give all pixels on a device."""
        if self.on_device is None:
            return self.pixels.to(device, non_blocking=True)
        positions, decoded = self.on_device
        whole = len(positions) == len(self.pixels)
        pixels = torch.empty_like(decoded) if whole else self.pixels.to(decoded.device, non_blocking=True, copy=True)
        return pixels.index_copy_(0, to_device(torch.from_numpy(positions), decoded.device), decoded).to(device)


class ImagePipeline:
    """Decode images on the host, and augment and normalise batches of them on a device.

    `crop` is for whole images without augmentation; `length` are the bytes of an image's prepared pixels.
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
        """Decode and prepare one image, or give the error if it cannot be."""
        try:
            data = encoded_bytes(value)
            source = value if data is None else data
            if self.preparation.takes_tensors:
                image: Any = decode_pixels(source, self.preparation.least_size)
            else:
                image = decode_image(source)
            height, width = image.size[::-1] if isinstance(image, Image.Image) else image.shape[1:]
            # As decoders lay them out: ordering channels here would take a tenth of the time that decoding takes.
            prepared = self.preparation(image).permute(1, 2, 0).numpy()
            pixels = np.ascontiguousarray(prepared).reshape(-1).view(np.uint8)
            return DecodedImage(pixels, width / height, 0 if data is None else xxh3_64_intdigest(data))
        except UnreadableImageError as error:
            return error
        # One image that a processor cannot take must not end a run; many end it with this reason.
        except Exception as error:
            return UnreadableImageError(f"{type(error).__name__}: {error}")

    @property
    def decodes_on_gpu(self) -> bool:
        """Whether a GPU can decode what is prepared so: evaluation needs the pixels of Pillow."""
        return self.preparation.resize_crop is not None and gpu_decoder() is not None

    @property
    def gpu_reader(self) -> Read | None:
        """What reads files for a GPU; `None` where it could not decode what is prepared so, as in evaluation."""
        return None if self.preparation.resize_crop is None else self.read_for_gpu

    def read_for_gpu(self, value: Any) -> EncodedImage | None:
        """Read a file that nvJPEG decodes reliably; `None` for other images."""
        try:
            data = encoded_bytes(value)
        except UnreadableImageError:
            return None
        header = common_jpeg(data) if data else None
        if not data or not header or not header.upright or self.preparation.is_long(header.height, header.width):
            return None
        # Tensors share memory that can be written to.
        return EncodedImage(np.frombuffer(bytearray(data), np.uint8), header.height, header.width)

    def decode_on_gpu(
        self,
        batch: HostBatch,
        positions: Rows,
        rest: Mapping[int, Rest],
        device: torch.device | None,
        keep: Keep | None = None,
    ) -> dict[int, UnreadableImageError]:
        """Decode the files among the rest of a batch to their positions, on a CUDA device; return the errors.

        Threads decode what it cannot. `keep` is called with all images, by their numbers.
        """
        files = {i: file for i, file in rest.items() if isinstance(file, EncodedImage)}
        errors = {i: error for i, error in rest.items() if isinstance(error, UnreadableImageError)}
        pixels, ratios, resize_crop = batch.pixels.numpy(), batch.ratios.numpy(), self.preparation.resize_crop
        kept: dict[int, DecodedImage] = {}
        done: list[int] = []
        failed: list[int] = []
        prepared: list[Tensor] = []
        for group in _of_similar_size({i: (file.height, file.width) for i, file in files.items()}):
            images = None if device is None else decode_on_gpu([files[i].file for i in group], device)
            if images is None or resize_crop is None:
                failed += group
            else:
                done += group
                prepared.append(_prepare_batch(images, resize_crop).permute(0, 2, 3, 1).flatten(1))
        for i, image in zip(failed, in_threads(self.decode, [files[i].file.tobytes() for i in failed]), strict=True):
            if isinstance(image, DecodedImage):
                pixels[positions[i]], ratios[positions[i]], kept[i] = image.pixels, image.ratio, image
            else:
                errors[i] = image
        if done:
            on_device = torch.cat(prepared)
            batch.on_device = positions[done], on_device
            ratios[positions[done]] = [files[i].width / files[i].height for i in done]
            if keep:
                # Copies to pinned memory are many times as fast.
                host = torch.empty_like(on_device, device="cpu", pin_memory=on_device.is_cuda).copy_(on_device).numpy()
                hashes = [xxh3_64_intdigest(files[i].file.data) for i in done]
                shapes = ratios[positions[done]].tolist()
                kept |= {i: DecodedImage(*image) for i, *image in zip(done, host, shapes, hashes, strict=True)}
        if keep and kept:
            keep(kept)
        return errors

    def finish(self, batch: HostBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Augment and normalise a batch on a device.

        Returns:
            `dict[str, torch.Tensor]`: `pixel_values`, float32 (N, 3, H, W), and `labels`: int64 (N,), or float32
            (N, classes) if the augmentation mixes images or the dataset holds shares of classes.
        """
        pixels = batch.pixels_on(torch.device(device))
        labels = to_device(batch.labels, torch.device(device))
        pixels = pixels.view(self.preparation.dtype).unflatten(1, (*self.preparation.size, 3))
        pixels = pixels.permute(0, 3, 1, 2)
        augmentation = self.augmentation
        if augmentation:
            pixels = augmentation(pixels, batch.ratios, self.preparation.output_size, batch.rows, batch.epoch)
        elif self._crop:
            pixels = self._crop(pixels, batch.ratios, self.preparation.output_size)
        else:
            pixels = pixels.contiguous()
        # Once a device: the host waits for a copy in each batch.
        if str(device) not in self._affine:
            self._affine[str(device)] = self.preparation.scale.to(device), self.preparation.shift.to(device)
        scale, shift = self._affine[str(device)]
        values = torch.addcmul(shift, pixels, scale)
        if augmentation and augmentation.mixes:
            values, labels = augmentation.mix(values, labels, self.num_classes, batch.rows, batch.epoch)
        return {"pixel_values": values, "labels": labels}


class PipelineDataset(BatchDataset):
    """Finish batches by an [`ImagePipeline`], and name the images that cannot be read."""

    pipeline: ImagePipeline
    unreadable: Any
    name: str
    _workers: Workers

    def decodes_on(self, device: torch.device | None) -> bool:
        """Tell whether a device decodes: a CUDA GPU does where few processes run."""
        is_cuda = device is not None and device.type == "cuda"
        return is_cuda and not self._workers.outrun_gpu and self.pipeline.decodes_on_gpu

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
    shapes = [image.shape[1:] for image in images]
    sizes, boxes = torch.tensor(shapes), {shape: resize_crop.box(*shape) for shape in set(shapes)}
    padded = images[0].new_zeros(len(images), *sizes.amax(0).tolist(), 3).permute(0, 3, 1, 2)
    start = 0
    # Each call takes time from the training. Most photographs have one of a few sizes.
    for (height, width), alike in groupby(images, lambda image: image.shape[1:]):
        group = [*alike]
        padded[start : start + len(group), :, :height, :width] = torch.stack(group)
        start += len(group)
    kept = torch.tensor([boxes[shape] for shape in shapes])
    resized = crop_and_resize(padded, kept, resize_crop.size, resize_crop.filter, sizes)
    return resized.round().clamp(0, 255).to(torch.uint8)
