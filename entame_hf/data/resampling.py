"""Cut boxes out of a batch of images and resize them, each image by a box of its own, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import to_device


def crop_and_resize(
    images: Tensor, boxes: Tensor, size: tuple[int, int], filter: str = "bicubic", sizes: Tensor | None = None
) -> Tensor:
    """Resize one box of each image to a common size, antialiased.

    Resampling is linear along each side, so that it is two products with a matrix of weights for each image: the
    same weights as Pillow's, for boxes that need not lie on whole pixels.

    Args:
        images (`torch.Tensor`): (N, C, H, W), uint8 or floating.
        boxes (`torch.Tensor`): float32 (N, 4): top, left, height and width in pixels, on the images' device.
        size (`tuple[int, int]`): height and width of the result.
        filter (`str`, *optional*, defaults to `"bicubic"`): or `"bilinear"`.
        sizes (`torch.Tensor`, *optional*): int64 (N, 2) on the device, the height and width of each image where the
            rest of it is padding. By default nothing is.

    Returns:
        `torch.Tensor`: floating (N, C, *size): float16 on CUDA, where half a level of 255 is its largest rounding
        error, else float32. Values are those of `images`, over which cubic weights may shoot a little.

    Example:

    ```python
    >>> crop_and_resize(images, torch.tensor([[0.0, 0.0, 48.0, 64.0]]), (24, 24)).shape
    torch.Size([1, 3, 24, 24])
    ```
    """
    dtype = torch.float16 if images.is_cuda else torch.float32
    if sizes is None:
        sizes = to_device(torch.tensor([images.shape[2:]]), images.device).expand(len(images), 2)
    rows, columns = (
        _weights(boxes[:, axis], boxes[:, axis + 2], sizes[:, axis], images.shape[axis + 2], size[axis], filter)
        for axis in (0, 1)
    )
    return rows.to(dtype)[:, None] @ (images.to(dtype) @ columns.to(dtype)[:, None].mT)


def _weights(start: Tensor, length: Tensor, limit: Tensor, source: int, target: int, filter: str) -> Tensor:
    """Compute how much each of `source` pixels counts for each of `target`: (N, target, source)."""
    pixels = torch.arange(max(source, target), device=start.device, dtype=torch.float32) + 0.5
    scale = (length / target)[:, None]
    centres = start[:, None] + pixels[:target] * scale
    distance = (pixels[:source] - centres[..., None]).abs() / scale.clamp_min(1)[..., None]
    weights = FILTERS[filter](distance) * (pixels[:source] < limit[:, None])[:, None]
    return weights / weights.sum(-1, keepdim=True)


def _cubic(x: Tensor) -> Tensor:
    """Evaluate Keys' cubic with a = -1/2, as Pillow does and torch where it antialiases."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


FILTERS = {"bilinear": lambda x: (1 - x).clamp_min(0), "bicubic": _cubic}
