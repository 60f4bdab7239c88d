"""Transform images as a model's image processor does, and change a processor's size or normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from PIL import Image
from timm.data.transforms import MaybeToTensor
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2
from transformers import BaseImageProcessor, TimmWrapperImageProcessor

from ..errors import InputError

Transform = Callable[[Image.Image], Tensor]

# An image of this side takes 200 MB.
LARGEST_SIDE = 8192


def evaluation_transform(processor: BaseImageProcessor) -> Transform:
    """Build the transform for evaluation, from an RGB image to a float tensor: exactly what the processor does."""
    if isinstance(processor, TimmWrapperImageProcessor):
        return processor.val_transforms
    return partial(_process, processor)


def pixel_transform(processor: BaseImageProcessor, tensors: bool) -> Callable[[Any], Tensor]:
    """Build the resize and crop of a processor, to a uint8 tensor (3, H, W) without scaling and normalisation.

    `tensors` takes uint8 tensors (3, H, W) in place of images; for some processors it fails or gives other pixels.
    """
    if not isinstance(processor, TimmWrapperImageProcessor):
        # EfficientNet's processor scales a second time if include_top is set.
        once: dict[str, Any] = {"include_top": False} if "include_top" in processor.to_dict() else {}
        return partial(_process, processor, do_rescale=False, do_normalize=False, **once)
    steps = processor.val_transforms.transforms
    steps = steps[: next(i for i, step in enumerate(steps) if isinstance(step, MaybeToTensor | v1.ToTensor))]
    if not tensors:
        return v2.Compose([*steps, v2.PILToTensor()])
    # timm's v1.Resize resizes tensors as floats.
    return v2.Compose([v2.Resize(s.size, s.interpolation) if isinstance(s, v1.Resize) else s for s in steps])


def output_size(processor: BaseImageProcessor) -> tuple[int, int]:
    """Measure the height and width of the images that a processor gives; refuse different ones, which fit no batch."""
    shapes = {tuple(evaluation_transform(processor)(Image.new("RGB", size)).shape) for size in ((96, 64), (64, 96))}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 3:
        raise InputError(f"{type(processor).__name__} does not give images of one size. Set it: `image_size=224`.")
    return shape[1], shape[2]


def set_image_size(processor: BaseImageProcessor, size: int) -> BaseImageProcessor:
    """Make a processor that resizes to size × size, without cropping.

    A processor that always keeps the aspect ratio (such as ConvNeXT's below 384) resizes the shorter edge to `size`
    and crops the centre.

    Args:
        processor ([`~transformers.BaseImageProcessor`]):
            The model's image processor; it does not change.
        size (`int`):
            Height and width.

    Returns:
        [`~transformers.BaseImageProcessor`]: A processor of the same class.

    Raises:
        InputError: If the size is out of bounds or the processor cannot be set to it.
    """
    if not 1 <= size <= LARGEST_SIDE:
        raise InputError(f"`image_size={size}` must be from 1 to {LARGEST_SIDE:,} pixels: try `image_size=224`.")
    if isinstance(processor, TimmWrapperImageProcessor):
        return _rebuild_timm(processor, input_size=(3, size, size), crop_pct=1.0, crop_mode="squash")
    square = {"height": size, "width": size}
    settings = processor.to_dict()
    exact = {"crop_pct": 1.0, "resize_short": size, "size_divisor": 1}
    exact = {key: value for key, value in exact.items() if key in settings}
    # Processors understand different settings and ignore the others: take the first that works.
    for attempt in (
        {"size": square, "do_center_crop": False, **exact},
        {"size": {"shortest_edge": size}, "do_center_crop": False, **exact},
        {"size": {"shortest_edge": size}, "do_center_crop": True, **exact},
    ):
        resized = _rebuild(processor, do_resize=True, crop_size=square, **attempt)
        try:
            if output_size(resized) == (size, size):
                return resized
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
    raise InputError(f"{type(processor).__name__} cannot be set to `image_size={size}`: leave `image_size` out.")


def set_normalization(
    processor: BaseImageProcessor, mean: Sequence[float], std: Sequence[float]
) -> BaseImageProcessor:
    """Make a processor that normalises with another mean and standard deviation, of values as it scales them.

    Raises:
        InputError: If a standard deviation is not positive or the processor does not apply them.
    """
    if min(std) <= 0:
        raise InputError(f"`std={list(std)}` must be positive in each channel: use `std=[1.0, 1.0, 1.0]` to leave it.")
    if isinstance(processor, TimmWrapperImageProcessor):
        return _rebuild_timm(processor, mean=tuple(mean), std=tuple(std))
    # EfficientNet's processor divides by the deviation a second time if include_top is set.
    once = {"include_top": False} if "include_top" in processor.to_dict() else {}
    plain, normalized = (
        _rebuild(processor, do_normalize=True, image_mean=m, image_std=s, **once)
        for m, s in (([0.0] * 3, [1.0] * 3), (list(mean), list(std)))
    )
    # Some processors ignore these settings (MobileViT's) or reorder channels (PPLCNet's).
    before, after = (evaluation_transform(p)(Image.new("RGB", (64, 64), (50, 100, 150))) for p in (plain, normalized))
    if not torch.allclose(v2.functional.normalize(before, list(mean), list(std)), after, atol=1e-3):
        raise InputError(f"{type(processor).__name__} cannot take another mean and std: leave `normalization` out.")
    return normalized


def update_pretrained_cfg(pretrained_cfg: dict[str, Any], processor: TimmWrapperImageProcessor) -> dict[str, Any]:
    """Write a timm processor's settings into its model's `config.pretrained_cfg`, where timm reads them.

    `TimmWrapperImageProcessor.save_pretrained` saves nothing, so other settings are lost.

    Args:
        pretrained_cfg (`dict[str, Any]`):
            The model's `config.pretrained_cfg`; it does not change.
        processor ([`~transformers.TimmWrapperImageProcessor`]):
            The processor that the model was trained with.

    Returns:
        `dict[str, Any]`: the new `pretrained_cfg`.
    """
    updated = {**pretrained_cfg, **processor.data_config}
    if tuple(updated["input_size"]) != tuple(pretrained_cfg.get("input_size", ())):
        # timm may prefer these in evaluation; they belong to the former size.
        updated = {k: v for k, v in updated.items() if k not in ("test_input_size", "test_crop_pct")}
    return updated


def _process(processor: BaseImageProcessor, image: Image.Image, **kwargs: Any) -> Tensor:
    return processor(image, return_tensors="pt", **kwargs)["pixel_values"][0]


def _rebuild(processor: BaseImageProcessor, **changes: Any) -> BaseImageProcessor:
    return type(processor).from_dict({**processor.to_dict(), **changes})


def _rebuild_timm(processor: TimmWrapperImageProcessor, **changes: Any) -> TimmWrapperImageProcessor:
    architecture = processor.to_dict().get("architecture")
    return type(processor)({**processor.data_config, **changes}, architecture=architecture)
