"""Crop and resize batches of images on any device, as an image processor does one by one."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms.v2 import functional as F
from transformers import BaseImageProcessor, TimmWrapperImageProcessor

from .batches import to_device


def crop_and_resize(
    images: Tensor, boxes: Tensor, size: tuple[int, int], filter: str = "bicubic", sizes: Tensor | None = None
) -> Tensor:
    """Resize one box of each image to a common size, antialiased.

    Each side is a product with a matrix of weights. They are Pillow's, for boxes that need not lie on whole pixels.

    Args:
        images (`torch.Tensor`): (N, C, H, W), uint8 or floating; with channels last in memory they take less time.
        boxes (`torch.Tensor`): float32 (N, 4) on the host: top, left, height and width in pixels.
        size (`tuple[int, int]`): height and width of the result.
        filter (`str`, *optional*, defaults to `"bicubic"`): or `"bilinear"`.
        sizes (`torch.Tensor`, *optional*): int64 (N, 2) on the host, height and width of each image without its
            padding.

    Returns:
        `torch.Tensor`: floating (N, C, *size): float16 on CUDA (rounding errors up to half a level of 255), else
        float32. Cubic weights may overshoot the range of `images` a little.
    """
    dtype = torch.float16 if images.is_cuda else torch.float32
    if sizes is None:
        sizes = torch.tensor([images.shape[2:]]).repeat(len(images), 1)
    rows, columns = (
        _weights(boxes[:, axis::2], sizes[:, axis], images.shape[axis + 2], size[axis], filter, images.device, dtype)
        for axis in (0, 1)
    )
    # All channels in one product: broadcasting would copy the weights for each.
    shorter = rows @ images.permute(0, 2, 3, 1).to(dtype).flatten(2)
    channels_first = shorter.unflatten(2, (images.shape[3], -1)).permute(0, 3, 1, 2)
    return (channels_first.flatten(1, 2) @ columns.mT).unflatten(1, (images.shape[1], -1))


def _weights(
    spans: Tensor, limits: Tensor, source: int, target: int, filter: str, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Compute how much each of `source` pixels counts for each of `target`, (N, target, source), on a device.

    `spans`, (N, 2), are the starts and lengths that are resized; pixels from `limits` on do not count.
    """
    # Only so many pixels around the centre of each target count. A margin takes those that are outside.
    reach = math.ceil(_REACH * max(1.0, float(spans[:, 1].max()) / target))
    margin, near = 8 * (reach // 8 + 1), torch.arange(-reach, reach + 1, device=device)
    start, length = to_device(spans.contiguous(), device).T[..., None]
    scale = length / target
    centres = start + (torch.arange(target, device=device) + 0.5) * scale
    pixels = centres.floor().long()[..., None] + near
    distance = (pixels + 0.5 - centres[..., None]).abs() / scale.clamp_min(1)[..., None]
    inside = (pixels >= 0) & (pixels < to_device(limits.contiguous(), device)[:, None, None])
    weights = FILTERS[filter](distance) * inside
    weights = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    places = (pixels + margin).clamp_(0, source + 2 * margin - 1)
    dense = weights.new_zeros(len(spans), target, source + 2 * margin).scatter_(2, places, weights)
    return dense[..., margin : margin + source]


def _cubic(x: Tensor) -> Tensor:
    """Evaluate Keys' cubic with a = -1/2, as Pillow does and torch where it antialiases."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


# Beyond this distance, in pixels of the larger scale, both filters are 0.
_REACH = 2
FILTERS = {"bilinear": lambda x: (1 - x).clamp_min(0), "bicubic": _cubic}


class ResizeCrop(NamedTuple):
    """Describe a resize of the shorter edge and a centre crop, or a resize to a fixed size.

    Attributes:
        size (`tuple[int, int]`): height and width of the result.
        edge (`int` or `None`): the shorter edge after the resize; `None` resizes the whole image to `size`.
        filter (`str`): `"bilinear"` or `"bicubic"`.
        rounds (`bool`): whether half a pixel off the centre is rounded (torchvision, timm) or dropped (transformers).
    """

    size: tuple[int, int]
    edge: int | None = None
    filter: str = "bicubic"
    rounds: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        """Resize and crop one image, uint8 (3, H, W): a processor does the same in several times the time."""
        after, corner = self._resized(*image.shape[1:])
        mode = F.InterpolationMode.BILINEAR if self.filter == "bilinear" else F.InterpolationMode.BICUBIC
        return F.crop(F.resize(image, after, mode, antialias=True), *corner, *self.size)

    def box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Compute the part of an image that is kept, in its pixels: top, left, height and width."""
        after, (top, left) = self._resized(height, width)
        y, x = height / after[0], width / after[1]
        return top * y, left * x, self.size[0] * y, self.size[1] * x

    def _resized(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Compute the size after the resize, and the corner of the crop in it."""
        short = min(height, width)
        after = list(self.size) if self.edge is None else [int(self.edge * side / short) for side in (height, width)]
        whole = round if self.rounds else int
        return after, [whole((side - kept) / 2) for side, kept in zip(after, self.size, strict=True)]


def find_resize_crop(
    processor: BaseImageProcessor, probes: list[Image.Image], prepared: list[Tensor]
) -> ResizeCrop | None:
    """Find the resize and crop that give what a processor gave, uint8 (3, H, W) each, of probes.

    Returns:
        [`ResizeCrop`] or `None`: `None` if none comes within half a level of 255 on average.
    """
    size = (prepared[0].shape[1], prepared[0].shape[2])
    for edge, name in product(_edges(processor, min(size)), FILTERS):
        candidate = ResizeCrop(size, edge, name, isinstance(processor, TimmWrapperImageProcessor))
        if all(_difference(candidate, probe, pixels) < 0.5 for probe, pixels in zip(probes, prepared, strict=True)):
            return candidate
    return None


def _edges(processor: BaseImageProcessor, size: int) -> list[int | None]:
    if isinstance(processor, TimmWrapperImageProcessor):
        steps = processor.val_transforms.transforms
        return [None, *(step.size for step in steps if isinstance(step, v1.Resize) and isinstance(step.size, int))]
    settings = processor.to_dict()
    edge = (settings.get("size") or {}).get("shortest_edge", size)
    return [None, edge, int(edge / (settings.get("crop_pct") or 1))]


def _difference(candidate: ResizeCrop, probe: Image.Image, pixels: Tensor) -> float:
    box = torch.tensor([candidate.box(probe.height, probe.width)])
    given = crop_and_resize(F.pil_to_tensor(probe)[None], box, candidate.size, candidate.filter)[0]
    return float((given.clamp(0, 255) - pixels).abs().mean())


class EvaluationCrop:
    """Take of whole images, resized to squares, what evaluation takes of them: by default all."""

    def __init__(self, resize_crop: ResizeCrop | None) -> None:
        self._resize_crop = resize_crop

    def __call__(self, pixels: Tensor, ratios: Tensor, size: tuple[int, int]) -> Tensor:
        """Crop and resize uint8 (N, C, H, W) to floating (N, C, *size), by the images' ratios of width to height."""
        crop = self._resize_crop or ResizeCrop(size)
        # The shape of an image of this ratio; its scale does not matter.
        shapes = [(_LARGE, _LARGE * ratio) for ratio in ratios.tolist()]
        boxes = torch.tensor([crop.box(round(height), max(round(width), 1)) for height, width in shapes])
        whole = torch.tensor([[height, width, height, width] for height, width in shapes])
        scale = torch.tensor([pixels.shape[2], pixels.shape[3]] * 2)
        return crop_and_resize(pixels, boxes / whole * scale, size).clamp(0, 255)


# Sides of this length round next to nothing.
_LARGE = 10_000
