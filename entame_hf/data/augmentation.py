"""Augment batches on the training device, each image by chances that depend on nothing but seed, epoch and row."""

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

# Where a crop's area and shape are drawn from, and how often it is tried: torchvision's RandomResizedCrop.
_AREA, _RATIO, _TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10

# Far outside, Beta(α, α) has quantiles that are no numbers any more.
_ALPHA = (1e-6, 1e6)

Rows = NDArray[np.int64]

Chances = NDArray[np.float32]


def chances(seed: int, epoch: int, purpose: str, rows: Rows, count: int) -> Chances:
    """Draw numbers in [0, 1) for rows of a dataset, the same whatever is drawn beside them and in which order.

    Each is a hash of what it belongs to (the mixing function of splitmix64), so there is no state to restore.

    Args:
        seed, epoch (`int`): what else decides.
        purpose (`str`): numbers for different purposes are independent.
        rows (`numpy.ndarray`): int64 (N,), the rows.
        count (`int`): numbers a row.

    Returns:
        `numpy.ndarray`: float32 (N, count).

    Source: Steele, Lea and Flood, [Fast splittable pseudorandom number
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
    """Say what is done to training images beyond what is done in evaluation.

    Args:
        name (`str`, *optional*, defaults to `"flip"`):
            `"none"`; `"flip"`, a random horizontal flip; `"random_resized_crop"`, a flipped random crop of 8 to 100 %
            of the area, resized to the model's input; `"randaugment"`, a flip and two of RandAugment's operations of
            magnitude 9.
        mixup_alpha (`float`, *optional*, defaults to 0):
            Blend each image and its label with those of its neighbour in the batch, by a share from Beta(α, α). 0 is
            off.
        cutmix_alpha (`float`, *optional*, defaults to 0):
            Put a box of another image into each, of an area from Beta(α, α). Where both are given, each image gets
            one of the two by a coin.
        seed (`int`, *optional*, defaults to 42):
            The same seed gives the same images in each epoch, whatever the batches and processes.

    Raises:
        InputError: If there is no such augmentation, or an α is neither 0 nor from 1e-6 to 1e6.
    """

    def __init__(self, name: str = "flip", mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, seed: int = 42):
        if name not in AUGMENTATIONS:
            raise InputError(f"--augmentation {name}: no such choice. Choices: {', '.join(AUGMENTATIONS)}.")
        for flag, alpha in (("--mixup_alpha", mixup_alpha), ("--cutmix_alpha", cutmix_alpha)):
            if alpha != 0 and not _ALPHA[0] <= alpha <= _ALPHA[1]:
                raise InputError(
                    f"{flag} {alpha} must be 0, which is off, or from {_ALPHA[0]:g} to {_ALPHA[1]:g}: try 0.2."
                )
        self.name, self.seed = name, seed
        self.mixup_alpha, self.cutmix_alpha = mixup_alpha, cutmix_alpha

    @property
    def crops(self) -> bool:
        """Whether crops are taken, so that whole images are needed."""
        return self.name == "random_resized_crop"

    @property
    def mixes(self) -> bool:
        """Whether labels become shares of classes."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def check(self, dtype: torch.dtype) -> None:
        """Refuse prepared images that can't be augmented so.

        Args:
            dtype (`torch.dtype`): what they are prepared to, see [`Preparation`].

        Raises:
            InputError: If RandAugment, which knows levels of 0 to 255, is asked of other values.
        """
        if self.name == "randaugment" and dtype != torch.uint8:
            raise InputError(
                "--augmentation randaugment needs images that are resized in bytes, and this model's image processor "
                f"gives {str(dtype).removeprefix('torch.')} values alone: use --augmentation flip or none."
            )

    def __call__(self, pixels: Tensor, ratios: Tensor, size: tuple[int, int], rows: Rows, epoch: int) -> Tensor:
        """Augment a batch, before values are normalised.

        Args:
            pixels (`torch.Tensor`): (N, C, H, W); uint8, values to 255, for crops and RandAugment.
            ratios (`torch.Tensor`): float32 (N,) on the CPU, width over height that images had before preparation.
            size (`tuple[int, int]`): height and width of the model's input.
            rows (`numpy.ndarray`): int64 (N,), which rows of the dataset these are.
            epoch (`int`): the epoch.

        Returns:
            `torch.Tensor`: (N, C, *size), on the device of `pixels`.
        """
        self.check(pixels.dtype)
        draw = partial(chances, self.seed, epoch, rows=rows)
        if self.crops:
            boxes = _random_boxes(ratios.numpy(), draw("crop", count=2 * _TRIES + 2))
            scale = np.array([pixels.shape[2], pixels.shape[3]] * 2, np.float32)
            pixels = crop_and_resize(pixels, _on(boxes * scale, pixels), size)
        if self.name != "none":
            flipped = _on(draw("flip", count=1)[:, :, None, None] < 0.5, pixels)
            pixels = torch.where(flipped, pixels.flip(-1), pixels)
        if self.name == "randaugment":
            for turn in range(2):
                pixels = _rand_augment(pixels, draw(f"operation {turn}", count=2))
        return pixels

    def mix(self, pixels: Tensor, labels: Tensor, classes: int, rows: Rows, epoch: int) -> tuple[Tensor, Tensor]:
        """Mix images and their labels in pairs: the first with the second, the third with the fourth, and so on.

        Where processes have batches of an even size, these are the pairs of one process that has all of them. The last
        of an odd number stays as it is.

        Args:
            pixels (`torch.Tensor`): floating (N, C, H, W).
            labels (`torch.Tensor`): int64 (N,).
            classes (`int`): the number of classes.
            rows, epoch: as for augmenting.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: the images, and float32 (N, classes): a share of each class.
        """
        draws = chances(self.seed, epoch, "mix", rows, 4)
        height, width = pixels.shape[-2:]
        cuts = (
            draws[:, 0] < 0.5 if self.mixup_alpha and self.cutmix_alpha else np.full(len(rows), self.cutmix_alpha > 0)
        )
        alpha = np.where(cuts, self.cutmix_alpha, self.mixup_alpha)
        own = betaincinv(alpha, alpha, draws[:, 1]).astype(np.float32)
        # Which share of a pixel is the image's own: the same everywhere, or none inside a box and all outside.
        rows_inside, columns_inside = (
            _on(_covered(draws[:, axis + 2], np.sqrt(1 - own), side), pixels)
            for axis, side in enumerate((height, width))
        )
        inside = rows_inside[:, :, None] & columns_inside[:, None, :]
        share = torch.where(_on(cuts[:, None, None], pixels), 1 - inside.float(), _on(own[:, None, None], pixels))
        targets = one_hot(labels, classes).float()
        places = np.arange(len(rows))
        other = _on(np.minimum(places ^ 1, len(rows) - 1), pixels)
        return (
            torch.lerp(pixels[other], pixels, share[:, None].to(pixels.dtype)),
            torch.lerp(targets[other], targets, share.mean((1, 2))[:, None]),
        )


def _on(values: NDArray, like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(values), like.device)


def _covered(centre: Chances, share: Chances, length: int) -> NDArray[np.bool_]:
    """Tell which of `length` pixels lie within share/2 of a centre: (N, length)."""
    pixels = (np.arange(length, dtype=np.float32) + 0.5) / length
    return np.abs(pixels - centre[:, None]) < share[:, None] / 2


def _random_boxes(ratios: Chances, draws: Chances) -> Chances:
    """Draw crops as torchvision's RandomResizedCrop: (N, 4), top, left, height and width as shares of the image."""
    area = _AREA[0] + (_AREA[1] - _AREA[0]) * draws[:, :_TRIES]
    shape = np.exp(np.log(_RATIO[0]) + np.log(_RATIO[1] / _RATIO[0]) * draws[:, _TRIES : 2 * _TRIES])
    widths, heights = np.sqrt(area * shape / ratios[:, None]), np.sqrt(area / shape * ratios[:, None])
    fits = (widths <= 1) & (heights <= 1)
    # Where none of the tries fits, the largest box in the middle whose shape is allowed.
    rows, first = np.arange(len(ratios)), fits.argmax(1)
    allowed = ratios.clip(*_RATIO)
    width = np.where(fits.any(1), widths[rows, first], np.minimum(1, allowed / ratios))
    height = np.where(fits.any(1), heights[rows, first], np.minimum(1, ratios / allowed))
    offset = np.where(fits.any(1)[:, None], draws[:, 2 * _TRIES :], 0.5)
    return np.stack([(1 - height) * offset[:, 0], (1 - width) * offset[:, 1], height, width], 1).astype(np.float32)


def _affine(
    x: Tensor, angle: float = 0.0, shift: tuple[float, float] = (0, 0), shear: tuple[float, float] = (0, 0)
) -> Tensor:
    return F.affine(x, angle, [int(shift[0] * x.shape[-1]), int(shift[1] * x.shape[-2])], 1.0, list(shear))


def _both_ways(operation: Callable[..., Tensor], zero: float, strength: float) -> tuple[Callable, Callable]:
    return tuple(lambda x, s=sign: operation(x, zero + s * strength) for sign in (1, -1))  # type: ignore[return-value]


def _one_way(operation: Callable[[Tensor], Tensor]) -> tuple[Callable, Callable]:
    return operation, operation


# torchvision's RandAugment at magnitude 9 of 31: a pair each, of which one is drawn.
_OPERATIONS = [
    _one_way(lambda x: x),
    _both_ways(lambda x, s: _affine(x, shear=(s, 0)), 0, float(np.degrees(np.arctan(0.09)))),
    _both_ways(lambda x, s: _affine(x, shear=(0, s)), 0, float(np.degrees(np.arctan(0.09)))),
    _both_ways(lambda x, s: _affine(x, shift=(s, 0)), 0, 0.3 * 150 / 331),
    _both_ways(lambda x, s: _affine(x, shift=(0, s)), 0, 0.3 * 150 / 331),
    _both_ways(lambda x, s: _affine(x, angle=s), 0, 9.0),
    _both_ways(F.adjust_brightness, 1, 0.27),
    _both_ways(F.adjust_saturation, 1, 0.27),
    _both_ways(F.adjust_contrast, 1, 0.27),
    _both_ways(F.adjust_sharpness, 1, 0.27),
    _one_way(lambda x: F.posterize(x, 7)),
    _one_way(lambda x: F.solarize(x, 0.7 * 255)),
    _one_way(F.autocontrast),
    _one_way(F.equalize),
]


def _rand_augment(pixels: Tensor, draws: Chances) -> Tensor:
    """Apply one operation to each image: images that drew the same go together."""
    drawn, sides = (draws[:, 0] * len(_OPERATIONS)).astype(int), (draws[:, 1] < 0.5).astype(int)
    result = pixels.clone()
    for number, pair in enumerate(_OPERATIONS):
        for side, operation in enumerate(pair):
            members = np.flatnonzero((drawn == number) & (sides == side))
            if len(members):
                index = _on(members, pixels)
                result[index] = operation(pixels[index])
    return result
