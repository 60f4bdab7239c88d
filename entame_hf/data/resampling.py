"""Cut boxes out of a batch of images and resize them, each image by a box of its own, on any device."""

import torch
from torch import Tensor


def crop_and_resize(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize one box of each image to a common size: bicubic, antialiased.

    Resampling is linear along each side, so that it is two products with a matrix of weights for each image: the
    same weights as Pillow's, for boxes that need not lie on whole pixels.

    Args:
        images (`torch.Tensor`): (N, C, H, W), uint8 or floating.
        boxes (`torch.Tensor`): float32 (N, 4): top, left, height and width in pixels, on the images' device.
        size (`tuple[int, int]`): height and width of the result.

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
    top, left, height, width = boxes.unbind(1)
    rows = _weights(top, height, images.shape[2], size[0]).to(dtype)
    columns = _weights(left, width, images.shape[3], size[1]).to(dtype)
    return rows[:, None] @ (images.to(dtype) @ columns[:, None].mT)


def _weights(start: Tensor, length: Tensor, source: int, target: int) -> Tensor:
    """Compute how much each of `source` pixels counts for each of `target`: (N, target, source)."""
    pixels = torch.arange(max(source, target), device=start.device, dtype=torch.float32) + 0.5
    scale = (length / target)[:, None]
    centres = start[:, None] + pixels[:target] * scale
    distance = (pixels[:source] - centres[..., None]).abs() / scale.clamp_min(1)[..., None]
    weights = _cubic(distance)
    return weights / weights.sum(-1, keepdim=True)


def _cubic(x: Tensor) -> Tensor:
    """Evaluate Keys' cubic with a = -1/2, which Pillow uses and torch's antialiased bicubic."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
