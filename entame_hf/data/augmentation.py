"""Augment batches on the training device, by numbers drawn for seed, epoch and row.

torchvision's RandAugment, MixUp and CutMix draw once for a whole batch. Here the same seed gives the same images for
any number of workers and processes and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv
from torch import Tensor
from torch.nn.functional import one_hot
from torchvision.transforms.v2 import functional as F

from ..errors import InputError
from .batches import to_device
from .resampling import crop_and_resize

AUGMENTATIONS = ("none", "flip", "random_resized_crop", "randaugment")

# Ranges of a crop's area and aspect ratio, and attempts: torchvision's RandomResizedCrop.
_AREA, _RATIO, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10

# Far outside, quantiles of Beta(α, α) are NaN.
_ALPHA = (1e-6, 1e6)
Rows = NDArray[np.int64]
Draws = NDArray[np.float32]


def draw_uniform(seed: int, epoch: int, purpose: str, rows: Rows, count: int) -> Draws:
    """Draw uniform numbers in [0, 1), float32 (N, count), that depend on their arguments alone: there is no state.

    Source: splitmix64 of Steele, Lea and Flood, [Fast splittable pseudorandom number
    generators](https://doi.org/10.1145/2714064.2660195), 2014.
    """
    x = (rows[:, None] * count + np.arange(count)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + _key(
        seed, epoch, purpose
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


@lru_cache
def _key(seed: int, epoch: int, purpose: str) -> np.uint64:
    return np.random.SeedSequence([seed, epoch, *purpose.encode()]).generate_state(1, np.uint64)[0]


class Augmentation:
    """Augment training images.

    Args:
        name (`str`, *optional*, defaults to `"flip"`):
            `"none"`; `"flip"`, a random horizontal flip; `"random_resized_crop"`, a flip and a random crop of 8 to
            100 % of the area, resized to the model's input; `"randaugment"`, a flip and two operations of RandAugment
            at magnitude 9.
        mixup_alpha (`float`, *optional*, defaults to 0):
            Blend each image and its label with its neighbour's in the batch, by a weight from Beta(α, α); 0 is off.
        cutmix_alpha (`float`, *optional*, defaults to 0):
            Paste a box of the neighbour into each image, of an area from Beta(α, α); 0 is off. If both are set, each
            image gets one of the two with probability 1/2.
        seed (`int`, *optional*, defaults to 42):
            Decides the images of each epoch, for any batch size and number of processes.

    Raises:
        InputError: If there is no such augmentation, or an α is neither 0 nor from 1e-6 to 1e6.
    """

    def __init__(self, name: str = "flip", mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, seed: int = 42):
        if name not in AUGMENTATIONS:
            raise InputError(
                f"`augmentation={name}` does not exist. Choose one of {', '.join(AUGMENTATIONS)}: `augmentation=flip`."
            )
        for option, alpha in (("mixup_alpha", mixup_alpha), ("cutmix_alpha", cutmix_alpha)):
            if alpha != 0 and not _ALPHA[0] <= alpha <= _ALPHA[1]:
                raise InputError(
                    f"`{option}={alpha}` must be 0, which is off, or from {_ALPHA[0]:g} to {_ALPHA[1]:g}: try "
                    f"`{option}=0.2`."
                )
        self.name, self.seed = name, seed
        self.mixup_alpha, self.cutmix_alpha = mixup_alpha, cutmix_alpha

    @property
    def crops(self) -> bool:
        """Whether it takes random crops, which need whole images."""
        return self.name == "random_resized_crop"

    @property
    def mixes(self) -> bool:
        """Whether labels become probabilities of classes."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def check(self, dtype: torch.dtype) -> None:
        """Refuse RandAugment for images that are not prepared as levels of 0 to 255."""
        if self.name == "randaugment" and dtype != torch.uint8:
            raise InputError(
                "`augmentation=randaugment` needs images that are resized as bytes, but this model's image processor "
                f"gives {str(dtype).removeprefix('torch.')} values: use `augmentation=flip` or none."
            )

    def __call__(self, pixels: Tensor, ratios: Tensor, size: tuple[int, int], rows: Rows, epoch: int) -> Tensor:
        """Augment a batch before it is normalised: (N, C, H, W) to (N, C, *size)."""
        self.check(pixels.dtype)
        draw = partial(draw_uniform, self.seed, epoch, rows=rows)
        if self.crops:
            boxes = _random_boxes(ratios.numpy(), draw("crop", count=2 * _TRIES + 2))
            scale = np.array([pixels.shape[2], pixels.shape[3]] * 2, np.float32)
            pixels = crop_and_resize(pixels, torch.from_numpy(boxes * scale), size)
        pixels = pixels.contiguous()
        if self.name != "none":
            flipped = _on(draw("flip", count=1)[:, :, None, None] < 0.5, pixels)
            pixels = torch.where(flipped, pixels.flip(-1), pixels)
        if self.name == "randaugment":
            for turn in range(2):
                pixels = _rand_augment(pixels, draw(f"operation {turn}", count=2))
        return pixels

    def mix(self, pixels: Tensor, labels: Tensor, classes: int, rows: Rows, epoch: int) -> tuple[Tensor, Tensor]:
        """Mix images, floating (N, C, H, W), and labels in pairs: the first with the second, and so on.

        Processes with an even batch size have the same pairs as one process. The last of an odd number stays as it is.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: the images, and the probability of each class, float32 (N, classes).
        """
        draws = draw_uniform(self.seed, epoch, "mix", rows, 4)
        height, width = pixels.shape[-2:]
        cuts = (
            draws[:, 0] < 0.5 if self.mixup_alpha and self.cutmix_alpha else np.full(len(rows), self.cutmix_alpha > 0)
        )
        alpha = np.where(cuts, self.cutmix_alpha, self.mixup_alpha)
        own = betaincinv(alpha, alpha, draws[:, 1]).astype(np.float32)
        # The weight of the own image at each pixel: the same everywhere, or 0 inside a box and 1 outside.
        rows_inside, columns_inside = (
            _on(_covered(draws[:, axis + 2], np.sqrt(1 - own), side), pixels)
            for axis, side in enumerate((height, width))
        )
        inside = rows_inside[:, :, None] & columns_inside[:, None, :]
        weight = torch.where(_on(cuts[:, None, None], pixels), 1 - inside.float(), _on(own[:, None, None], pixels))
        targets = labels if labels.ndim == 2 else one_hot(labels, classes).float()
        places = np.arange(len(rows))
        other = _on(np.minimum(places ^ 1, len(rows) - 1), pixels)
        return (
            torch.lerp(pixels[other], pixels, weight[:, None].to(pixels.dtype)),
            torch.lerp(targets[other], targets, weight.mean((1, 2))[:, None]),
        )


def _on(values: NDArray, like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(values), like.device)


def _covered(centre: Draws, fraction: Draws, length: int) -> NDArray[np.bool_]:
    """Tell which of `length` pixels lie within fraction/2 of a centre: (N, length)."""
    pixels = (np.arange(length, dtype=np.float32) + 0.5) / length
    return np.abs(pixels - centre[:, None]) < fraction[:, None] / 2


def _random_boxes(ratios: Draws, draws: Draws) -> Draws:
    """Draw crops as torchvision's RandomResizedCrop: (N, 4), top, left, height and width as fractions of the image."""
    area = _AREA[0] + (_AREA[1] - _AREA[0]) * draws[:, :_TRIES]
    shape = np.exp(np.log(_RATIO[0]) + np.log(_RATIO[1] / _RATIO[0]) * draws[:, _TRIES : 2 * _TRIES])
    widths, heights = np.sqrt(area * shape / ratios[:, None]), np.sqrt(area / shape * ratios[:, None])
    fits = (widths <= 1) & (heights <= 1)
    # If no attempt fits, the largest box in the centre with an allowed aspect ratio.
    rows, first = np.arange(len(ratios)), fits.argmax(1)
    allowed = ratios.clip(*_RATIO)
    width = np.where(fits.any(1), widths[rows, first], np.minimum(1, allowed / ratios))
    height = np.where(fits.any(1), heights[rows, first], np.minimum(1, ratios / allowed))
    offset = np.where(fits.any(1)[:, None], draws[:, 2 * _TRIES :], 0.5)
    return np.stack([(1 - height) * offset[:, 0], (1 - width) * offset[:, 1], height, width], 1).astype(np.float32)


def _translate(x: Tensor, right: float, down: float) -> Tensor:
    return F.affine(x, 0.0, [int(right * x.shape[-1]), int(down * x.shape[-2])], 1.0, [0.0, 0.0])


_SHEAR = float(np.degrees(np.arctan(0.09)))
_SHIFT = 0.3 * 150 / 331

# torchvision's RandAugment at magnitude 9 of 31: each operation with its strength, of which the sign is drawn.
_OPERATIONS: list[tuple[float, Callable[[Tensor, float], Tensor]]] = [
    (0, lambda x, s: x),
    (_SHEAR, lambda x, s: F.affine(x, 0.0, [0, 0], 1.0, [s, 0.0])),
    (_SHEAR, lambda x, s: F.affine(x, 0.0, [0, 0], 1.0, [0.0, s])),
    (_SHIFT, lambda x, s: _translate(x, s, 0)),
    (_SHIFT, lambda x, s: _translate(x, 0, s)),
    (9.0, lambda x, s: F.affine(x, s, [0, 0], 1.0, [0.0, 0.0])),
    (0.27, lambda x, s: F.adjust_brightness(x, 1 + s)),
    (0.27, lambda x, s: F.adjust_saturation(x, 1 + s)),
    (0.27, lambda x, s: F.adjust_contrast(x, 1 + s)),
    (0.27, lambda x, s: F.adjust_sharpness(x, 1 + s)),
    (0, lambda x, s: F.posterize(x, 7)),
    (0, lambda x, s: F.solarize(x, 0.7 * 255)),
    (0, lambda x, s: F.autocontrast(x)),
    (0, lambda x, s: F.equalize(x)),
]


def _rand_augment(pixels: Tensor, draws: Draws) -> Tensor:
    """Apply one operation to each image, together to all images that drew the same."""
    drawn, signs = (draws[:, 0] * len(_OPERATIONS)).astype(int), np.where(draws[:, 1] < 0.5, -1, 1)
    result = pixels.clone()
    for number, (strength, operation) in enumerate(_OPERATIONS):
        for sign in (1, -1):
            members = np.flatnonzero((drawn == number) & (signs == sign))
            if len(members):
                index = _on(members, pixels)
                result[index] = operation(pixels[index], sign * strength)
    return result
