"""Datasets in, batches out."""

from .arguments import DataArguments, build_datasets
from .augmentation import AUGMENTATIONS, Augmentation
from .channel_statistics import channel_statistics
from .dataset import ClassificationDataset
from .folders import load_image_folder
from .images import UnreadableImageError, decode_image, decode_pixels
from .preparation import Preparation
from .sources import Splits, load_splits, split_dataset
from .streaming import StreamingDataset, load_streams
from .transforms import (
    evaluation_transform,
    output_size,
    set_image_size,
    set_normalization,
    update_pretrained_cfg,
)

__all__ = [
    "AUGMENTATIONS",
    "Augmentation",
    "ClassificationDataset",
    "DataArguments",
    "Preparation",
    "Splits",
    "StreamingDataset",
    "UnreadableImageError",
    "build_datasets",
    "channel_statistics",
    "decode_image",
    "decode_pixels",
    "evaluation_transform",
    "load_image_folder",
    "load_splits",
    "load_streams",
    "output_size",
    "set_image_size",
    "set_normalization",
    "split_dataset",
    "update_pretrained_cfg",
]
