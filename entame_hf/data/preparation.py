"""Split an image processor in two: what is done to each image once, and what is done to batches of its pixels."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2.functional import InterpolationMode, pil_to_tensor, resize
from transformers import BaseImageProcessor

from ..errors import InputError
from .framing import Framing, find_framing
from .transforms import Transform, evaluation_transform, output_size, pixel_transform, set_image_size

# A crop of half of an image's area is then as sharp as the model's input.
_CANVAS = 1.5


class Preparation:
    """Prepare an image's pixels as an image processor does, up to scaling and normalising their values.

    That part is the same in every epoch, fits in bytes, and can be kept; the rest is `scale · pixels + shift`, cheap
    in batches on any device. Both are found by running the processor, and compared with it: where it can't be
    split so, all of it is done per image, and scale and shift are 1 and 0.

    Args:
        processor ([`~transformers.BaseImageProcessor`]):
            The model's image processor.
        exact (`bool`, *optional*, defaults to `True`):
            Whether pixels are those that `pipeline` will see. Otherwise they may differ by one level of 255 in
            places, where a faster resize exists.
        whole (`bool`, *optional*, defaults to `False`):
            Whether all of the image is kept, squashed to a square one and a half times as large as the model's input,
            for random crops to be taken from.

    Attributes:
        size (`tuple[int, int]`): Height and width of prepared images.
        output_size (`tuple[int, int]`): Height and width of the model's input.
        dtype (`torch.dtype`): uint8, or float32 where the processor can't be split.
        scale, shift (`torch.Tensor`): float32 (3, 1, 1).
        takes_tensors (`bool`): Whether it takes uint8 tensors (3, H, W), or `PIL.Image.Image`s.
        framing ([`Framing`] or `None`): The same work for batches on a GPU, where pixels need not be exact.
        key (`str`): What tells preparations apart: whether they are exact, and a digest of what they make of images.

    Raises:
        InputError: If the processor gives images of no common size, or `whole` is asked of one that can't be split.

    Example:

    ```python
    >>> preparation = Preparation(AutoImageProcessor.from_pretrained("google/vit-base-patch16-224"))
    >>> preparation(image).shape, preparation.dtype
    (torch.Size([3, 224, 224]), torch.uint8)
    ```
    """

    def __init__(self, processor: BaseImageProcessor, exact: bool = True, whole: bool = False):
        self._exact, self._whole = exact, whole
        self.output_size = output_size(processor)
        self._canvas = round(_CANVAS * max(self.output_size)) if whole else None
        if self._canvas:
            processor = set_image_size(processor, self._canvas)
        self.size = (self._canvas, self._canvas) if self._canvas else self.output_size
        probes = [_probe(180, 120), _probe(120, 180), _probe(48, 48)]
        everything = evaluation_transform(processor)
        self._prepare = pixel_transform(processor, tensors=False)
        self.scale, self.shift = _affine(everything)
        self.dtype = torch.uint8
        if not all(self._agrees(everything(probe), self._prepare(probe)) for probe in probes):
            if whole:
                raise InputError(
                    f"{type(processor).__name__} leaves no pixels to crop at random: use another augmentation."
                )
            self._prepare, self.dtype = everything, torch.float32
            self.scale, self.shift = torch.ones(3, 1, 1), torch.zeros(3, 1, 1)
        self.takes_tensors = not exact and self.dtype == torch.uint8 and self._use_tensors(processor, probes)
        self.framing = None if exact or self.dtype != torch.uint8 else self._find_framing(processor, probes)
        made = b"".join(self(self.convert(probe)).contiguous().numpy().tobytes() for probe in probes)
        # Files are decoded faster where pixels need not be exact, and to other ones.
        self.key = f"exact={exact} {hashlib.sha256(made).hexdigest()[:16]}"

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        """Prepare an RGB image: uint8 (3, H, W) where `takes_tensors`, else a `PIL.Image.Image`."""
        if self._canvas:
            image = resize(image, [self._canvas, self._canvas], InterpolationMode.BICUBIC, antialias=True)
        return self._prepare(image)

    def with_processor(self, processor: BaseImageProcessor) -> Preparation:
        """Prepare as another processor does, for the same purpose."""
        return Preparation(processor, self._exact, self._whole)

    def convert(self, image: Image.Image) -> Image.Image | Tensor:
        """Give an image in the form that this preparation takes."""
        return pil_to_tensor(image) if self.takes_tensors else image

    def _find_framing(self, processor: BaseImageProcessor, probes: list[Image.Image]) -> Framing | None:
        if self._canvas:
            return Framing(self.size)
        return find_framing(processor, probes, [self(self.convert(probe)) for probe in probes])

    def _agrees(self, values: Tensor, pixels: Tensor) -> bool:
        return pixels.dtype == torch.uint8 and torch.allclose(pixels * self.scale + self.shift, values, atol=1e-4)

    def _use_tensors(self, processor: BaseImageProcessor, probes: list[Image.Image]) -> bool:
        with_tensors, with_images = pixel_transform(processor, tensors=True), self._prepare
        try:
            differences = [with_tensors(pil_to_tensor(p)).int() - with_images(p).int() for p in probes]
        # Some steps know Pillow's images alone, and each says so in its own way.
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        if max(int(difference.abs().max()) for difference in differences) > 2:
            return False
        self._prepare = with_tensors
        return True


def _affine(transform: Transform) -> tuple[Tensor, Tensor]:
    """Measure what a processor does to values by what it makes of black and of white."""
    black, white = (transform(Image.new("RGB", (64, 64), colour)) for colour in ("black", "white"))
    # In the middle: some processors leave a border.
    y, x = black.shape[1] // 2, black.shape[2] // 2
    black, white = black[:, y : y + 1, x : x + 1], white[:, y : y + 1, x : x + 1]
    return (white - black) / 255, black


def _probe(width: int, height: int) -> Image.Image:
    """Draw smooth waves of every level, another in each channel, under some noise."""
    y, x = np.mgrid[0:height, 0:width] / 30
    waves = np.stack([np.sin(x), np.cos(y), np.sin(x + y)], axis=-1) * 110 + 127
    noise = np.random.default_rng(0).normal(0, 10, waves.shape)
    return Image.fromarray((waves + noise).clip(0, 255).astype(np.uint8))
