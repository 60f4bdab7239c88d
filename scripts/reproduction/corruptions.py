"""Corrupted test splits: noise, blur, lost contrast and JPEG, each at three strengths."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import functional as F

from entame_hf.data import ClassificationDataset


def _jpeg(images: Tensor, quality: float) -> Tensor:
    def one(image: Tensor) -> Tensor:
        file = BytesIO()
        F.to_pil_image(image).save(file, "JPEG", quality=int(quality))
        return F.pil_to_tensor(Image.open(file))

    return torch.stack([one(image) for image in images])


# Four kinds of Hendrycks and Dietterich's (2019), on images of the model's size: (N, 3, side, side), uint8. Strengths
# are standard deviations of pixels in [0, 1] and of a kernel in 64ths of a side, a factor, and libjpeg's quality.
CORRUPTIONS: dict[str, tuple[Callable[[Tensor, float], Tensor], tuple[float, float, float]]] = {
    "noise": (lambda images, sigma: F.gaussian_noise(images, sigma=sigma), (0.1, 0.2, 0.4)),
    "blur": (lambda images, sigma: F.gaussian_blur(images, [13, 13], [sigma * images.shape[-1] / 64]), (1, 2, 3)),
    "contrast": (F.adjust_contrast, (0.5, 0.25, 0.1)),
    "JPEG": (_jpeg, (25, 10, 4)),
}


class Pixels(Dataset[dict[str, Tensor]]):
    """Images in memory, normalised one by one.

    Args:
        images (`torch.Tensor` of shape `(N, 3, side, side)`): uint8.
        labels (`torch.Tensor` of shape `(N,)`): int64.
        mean, std (`torch.Tensor` of shape `(3, 1, 1)`): Of pixels in [0, 1].
    """

    def __init__(self, images: Tensor, labels: Tensor, mean: Tensor, std: Tensor) -> None:
        self.images, self.labels, self.mean, self.std = images, labels, mean, std

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        pixels = (self.images[index].float() / 255 - self.mean) / self.std
        return {"pixel_values": pixels, "labels": self.labels[index]}


def corrupted(test: ClassificationDataset, processor: Any) -> list[tuple[str, Pixels]]:
    """Corrupt the images of a test split: three datasets of each kind, with the same noise on every call.

    Args:
        test (`ClassificationDataset`): The clean images, as the model gets them.
        processor (`TimmWrapperImageProcessor`): Its mean and standard deviation.
    """
    mean, std = (torch.tensor(processor.data_config[name])[:, None, None] for name in ("mean", "std"))
    clean = test.finish(test.read(list(range(len(test)))))["pixel_values"].cpu() * std + mean
    images = (255 * clean).round().clamp(0, 255).byte().contiguous()
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for kind, (corrupt, strengths) in CORRUPTIONS.items():
            found += [(kind, Pixels(corrupt(images, strength), test.labels, mean, std)) for strength in strengths]
    return found
