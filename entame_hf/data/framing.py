"""Find out which part of an image a processor keeps, so that batches can be cut and resized on a device."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import BaseImageProcessor, TimmWrapperImageProcessor

from .resampling import FILTERS, crop_and_resize


class Framing(NamedTuple):
    """Say that images are resized to a shorter edge, of which the middle is kept, or squashed whole.

    Attributes:
        size (`tuple[int, int]`): Height and width of the result.
        edge (`int` or `None`): The shorter edge; `None` squashes.
        filter (`str`): `"bilinear"` or `"bicubic"`.
        rounds (`bool`): Whether half a pixel off the middle is rounded (torchvision, timm) or dropped (transformers).
    """

    size: tuple[int, int]
    edge: int | None = None
    filter: str = "bicubic"
    rounds: bool = False

    def box(self, height: int, width: int) -> tuple[float, float, float, float]:
        """Find what is kept of an image, in its pixels: top, left, height and width."""
        if self.edge is None:
            return 0.0, 0.0, float(height), float(width)
        short = min(height, width)
        resized = [int(self.edge * side / short) for side in (height, width)]
        steps = [side / after for side, after in zip((height, width), resized, strict=True)]
        whole = round if self.rounds else int
        top, left = (
            whole((after - kept) / 2) * step for after, kept, step in zip(resized, self.size, steps, strict=True)
        )
        return top, left, self.size[0] * steps[0], self.size[1] * steps[1]


def find_framing(processor: BaseImageProcessor, probes: list[Image.Image], prepared: list[Tensor]) -> Framing | None:
    """Find the framing that gives what a processor gave.

    Args:
        processor ([`~transformers.BaseImageProcessor`]): the processor, whose settings say what to try.
        probes (`list[PIL.Image.Image]`): images.
        prepared (`list[torch.Tensor]`): uint8 (3, H, W), what it made of each.

    Returns:
        [`Framing`] or `None`: `None` where none comes near.
    """
    size = (prepared[0].shape[1], prepared[0].shape[2])
    for edge, name in product(_edges(processor, min(size)), FILTERS):
        framing = Framing(size, edge, name, isinstance(processor, TimmWrapperImageProcessor))
        if all(_difference(framing, probe, pixels) < 0.5 for probe, pixels in zip(probes, prepared, strict=True)):
            return framing
    return None


def _edges(processor: BaseImageProcessor, size: int) -> list[int | None]:
    if isinstance(processor, TimmWrapperImageProcessor):
        steps = processor.val_transforms.transforms
        return [None, *(step.size for step in steps if isinstance(step, v1.Resize) and isinstance(step.size, int))]
    settings = processor.to_dict()
    edge = (settings.get("size") or {}).get("shortest_edge", size)
    return [None, edge, int(edge / (settings.get("crop_pct") or 1))]


def _difference(framing: Framing, probe: Image.Image, pixels: Tensor) -> float:
    box = torch.tensor([framing.box(probe.height, probe.width)])
    given = crop_and_resize(pil_to_tensor(probe)[None], box, framing.size, framing.filter)[0]
    return float((given.clamp(0, 255) - pixels).abs().mean())
