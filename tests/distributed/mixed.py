"""Batches of images that are mixed with each other, as `ClassificationDataset` reads them from files."""

from __future__ import annotations

import numpy as np
import torch
from conftest import RandomImages
from torch import Tensor

from entame_hf.data import Augmentation
from entame_hf.data.batches import BatchDataset


class MixedImages(BatchDataset):
    """By mixup and cutmix."""

    def __init__(self, count: int) -> None:
        self.images, self.augmentation = RandomImages(count), Augmentation("none", mixup_alpha=0.8, cutmix_alpha=1.0)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, indices: list[int], epoch: int, device: torch.device) -> tuple[list[int], int]:
        return indices, epoch

    def finish(self, batch: tuple[list[int], int], device: torch.device) -> dict[str, Tensor]:
        rows, epoch = batch
        pixels, labels = self.images.images[rows], self.images.labels[rows]
        pixels, labels = self.augmentation.mix(pixels, labels, 10, np.array(rows), epoch)
        return {"pixel_values": pixels, "labels": labels}
