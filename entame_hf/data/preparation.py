"""Split an image processor in two: per-image work on bytes, which can be cached, and per-batch scaling."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F
from transformers import BaseImageProcessor

from ..errors import InputError
from .resampling import EvaluationCrop, ResizeCrop, find_resize_crop
from .transforms import Transform, evaluation_transform, output_size, pixel_transform, set_image_size

# Images decoded to so many times their prepared size, and resized, differ by about one level on average.
_MARGIN = 1.5

# A crop of half of an image's area is then as sharp as the model's input.
_CANVAS = 1.5

# Ratio of the sides beyond which an image is cropped, or shrunk along its long side, before the processor resizes it.
_MAX_ASPECT = 8


class Preparation:
    """Prepare an image's pixels as an image processor does, up to scaling and normalising their values.

    This part is the same in every epoch, fits in bytes and is cached; the rest is `scale · pixels + shift`, in batches
    on any device. Both are measured by running the processor and compared with it. If a processor cannot be split,
    all of it runs per image, and scale and shift are 1 and 0.

    An image more than 8 times as long as wide is cropped to its centre first, or shrunk along its long side if the
    processor keeps all of it: resizing it would take gigabytes. Its pixels may differ from the processor's.

    Args:
        processor ([`~transformers.BaseImageProcessor`]): The model's image processor.
        exact (`bool`, *optional*, defaults to `True`): Whether pixels equal those that `pipeline` sees. Otherwise they
            may come from a faster resize, a GPU or a JPEG decoded at reduced scale, and differ by a few levels of 255.
        whole (`bool`, *optional*, defaults to `False`): Whether to keep the whole image, resized to a square of 1.5
            times the model's input, for random crops.

    Attributes:
        processor ([`~transformers.BaseImageProcessor`]): the one that is given.
        size, output_size (`tuple[int, int]`): height and width of prepared images and of the model's input.
        dtype (`torch.dtype`): uint8, or float32 if the processor cannot be split.
        scale, shift (`torch.Tensor`): float32 (3, 1, 1).
        takes_tensors (`bool`): whether it takes uint8 tensors (3, H, W), or `PIL.Image.Image`s.
        least_size (`tuple[int, int]` or `None`): height and width that JPEGs may be decoded to.
        resize_crop ([`ResizeCrop`] or `None`): the same for batches on a GPU.
        key (`str`): equal for preparations that give equal pixels.

    Raises:
        InputError: If the processor gives images of different sizes, or `whole` is asked of one that cannot be split.
    """

    def __init__(self, processor: BaseImageProcessor, exact: bool = True, whole: bool = False):
        self._exact, self._whole, self.processor = exact, whole, processor
        self.output_size = output_size(processor)
        self._canvas = round(_CANVAS * max(self.output_size)) if whole else None
        if self._canvas:
            processor = set_image_size(processor, self._canvas)
        self.size = (self._canvas, self._canvas) if self._canvas else self.output_size
        probes = [_probe(180, 120), _probe(120, 180), _probe(48, 48)]
        everything = evaluation_transform(processor)
        self._prepare: Any = pixel_transform(processor, tensors=False)
        self.scale, self.shift = _affine(everything)
        self.dtype = torch.uint8
        if not all(self._agrees(everything(probe), self._prepare(probe)) for probe in probes):
            if whole:
                raise InputError(
                    f"{type(processor).__name__} cannot be split, which `augmentation=random_resized_crop` needs: use "
                    "`augmentation=flip` or none."
                )
            self._prepare, self.dtype = everything, torch.float32
            self.scale, self.shift = torch.ones(3, 1, 1), torch.zeros(3, 1, 1)
        self._crops = not self._canvas and _ignores_ends(self._prepare)
        self.takes_tensors = not exact and self.dtype == torch.uint8 and self._use_tensors(processor, probes)
        self.resize_crop: ResizeCrop | None = None
        prepared = [self(self.convert(probe)) for probe in probes]
        if not exact and self.dtype == torch.uint8:
            self.resize_crop = ResizeCrop(self.size) if self._canvas else find_resize_crop(processor, probes, prepared)
            self._use_resize_crop(probes, prepared)
            prepared = [self(self.convert(probe)) for probe in probes]
        # Evaluation takes all pixels.
        self.least_size = None if exact else self._find_least_size()
        digest = hashlib.sha256(b"".join(pixels.contiguous().numpy().tobytes() for pixels in prepared))
        # Without `exact`, JPEGs may be decoded on a GPU, to other pixels.
        self.key = f"exact={exact} least={self.least_size} {digest.hexdigest()[:16]}"

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Prepare an RGB image: uint8 (3, H, W) if `takes_tensors`, else a `PIL.Image.Image`."""
        height, width = F.get_size(image)
        if self.is_long(height, width):
            image = self._shorten(image, height, width)
        if self._canvas and not isinstance(self._prepare, ResizeCrop):
            image = F.resize(image, [self._canvas, self._canvas], F.InterpolationMode.BICUBIC, antialias=True)
        return self._prepare(image)

    def is_long(self, height: int, width: int) -> bool:
        """Whether an image is so long that resizing all of it would take far more memory than the result."""
        return max(height, width) > self._max_aspect * min(height, width)

    def _find_least_size(self) -> tuple[int, int] | None:
        if self.resize_crop is None:
            return None
        sides = (self.resize_crop.edge,) * 2 if self.resize_crop.edge else self.size
        return round(_MARGIN * sides[0]), round(_MARGIN * sides[1])

    def with_processor(self, processor: BaseImageProcessor) -> Preparation:
        """Prepare as another processor does, for the same purpose."""
        return Preparation(processor, self._exact, self._whole)

    def is_as(self, processor: BaseImageProcessor) -> bool:
        """Tell whether another processor gives the same images."""
        if processor.to_dict() == self.processor.to_dict():
            return True
        try:
            other = self.with_processor(processor)
        # Of no common size.
        except InputError:
            return False
        values = ((self.scale, other.scale), (self.shift, other.shift))
        return self.key == other.key and all(torch.allclose(a, b, atol=1e-4) for a, b in values)

    def evaluation_crop(self) -> EvaluationCrop | None:
        """Build what crops a batch of whole images as evaluation does; `None` if images are not kept whole."""
        return EvaluationCrop(Preparation(self.processor, exact=False).resize_crop) if self._whole else None

    def convert(self, image: Image.Image) -> Image.Image | Tensor:
        """Convert an image to the type that this preparation takes."""
        return F.pil_to_tensor(image) if self.takes_tensors else image

    @property
    def _max_aspect(self) -> int:
        return _MAX_ASPECT * -(-max(self.size) // min(self.size))

    def _shorten(self, image: Any, height: int, width: int) -> Any:
        if self._crops:
            return F.center_crop(image, [min(height, self._max_aspect * width), min(width, self._max_aspect * height)])
        limit = _MAX_ASPECT // 2 * max(self.size)
        return F.resize(image, [min(height, limit), min(width, limit)], F.InterpolationMode.BILINEAR, antialias=True)

    def _agrees(self, values: Tensor, pixels: Tensor) -> bool:
        return pixels.dtype == torch.uint8 and torch.allclose(pixels * self.scale + self.shift, values, atol=1e-4)

    def _use_tensors(self, processor: BaseImageProcessor, probes: list[Image.Image]) -> bool:
        with_tensors = pixel_transform(processor, tensors=True)
        try:
            found = [with_tensors(F.pil_to_tensor(probe)) for probe in probes]
        # Some steps take Pillow's images only, and raise different errors for tensors.
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        if _largest_difference(found, [self._prepare(probe) for probe in probes]) > 2:
            return False
        self._prepare = with_tensors
        return True

    def _use_resize_crop(self, probes: list[Image.Image], prepared: list[Tensor]) -> None:
        if self.resize_crop is not None and self.takes_tensors:
            found = [self.resize_crop(F.pil_to_tensor(probe)) for probe in probes]
            if _largest_difference(found, prepared) <= 2:
                self._prepare = self.resize_crop


def _largest_difference(found: list[Tensor], expected: list[Tensor]) -> int:
    return max(int((a.int() - b.int()).abs().max()) for a, b in zip(found, expected, strict=True))


def _affine(transform: Transform) -> tuple[Tensor, Tensor]:
    """Measure the scale and shift of a processor by its output for black and white."""
    black, white = (transform(Image.new("RGB", (64, 64), colour)) for colour in ("black", "white"))
    # In the centre: some processors pad the border.
    y, x = black.shape[1] // 2, black.shape[2] // 2
    black, white = black[:, y : y + 1, x : x + 1], white[:, y : y + 1, x : x + 1]
    return (white - black) / 255, black


def _ignores_ends(transform: Transform) -> bool:
    """Whether a processor crops: the ends of a long image are not in its output."""
    black = Image.new("RGB", (256, 64))
    ends = black.copy()
    ends.paste((255, 255, 255), (0, 0, 32, 64))
    ends.paste((255, 255, 255), (224, 0, 256, 64))
    return torch.equal(transform(black), transform(ends))


def _probe(width: int, height: int) -> Image.Image:
    """Draw smooth waves of every level, different in each channel, with some noise."""
    y, x = np.mgrid[0:height, 0:width] / 30
    waves = np.stack([np.sin(x), np.cos(y), np.sin(x + y)], axis=-1) * 110 + 127
    noise = np.random.default_rng(0).normal(0, 10, waves.shape)
    return Image.fromarray((waves + noise).clip(0, 255).astype(np.uint8))
