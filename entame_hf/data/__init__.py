"""Datasets in, batches out."""

from .dataset import IGNORED_LABEL, ClassificationDataset
from .folders import load_image_folder
from .images import UnreadableImageError, decode_image
from .sources import Splits, load_splits, split_dataset
from .statistics import channel_statistics
from .transforms import (
    AUGMENTATIONS,
    evaluation_transform,
    output_size,
    set_image_size,
    set_normalization,
    training_transform,
    update_pretrained_cfg,
)

__all__ = [
    "AUGMENTATIONS",
    "IGNORED_LABEL",
    "ClassificationDataset",
    "Splits",
    "UnreadableImageError",
    "channel_statistics",
    "decode_image",
    "evaluation_transform",
    "load_image_folder",
    "load_splits",
    "output_size",
    "set_image_size",
    "set_normalization",
    "split_dataset",
    "training_transform",
    "update_pretrained_cfg",
]
