"""Datasets in, batches out."""

from .augmentation import AUGMENTATIONS, Augmentation
from .batches import BatchDataset, BatchLoader, batch_loader, for_evaluation, holds_batches, to_device
from .build import BuiltDatasets, build_datasets, channel_statistics
from .columns import balanced_class_weights, stratified_rows
from .dataset import ClassificationDataset
from .duplicates import find_duplicates
from .examples import fingerprint, known_classes, known_labels, known_preparation
from .folders import open_folder
from .images import UnreadableImageError, decode_image, is_converted
from .jpeg import decode_pixels
from .layout import LAYOUTS
from .loader import Splits, load_splits, split_dataset
from .pipeline import HostBatch, ImagePipeline
from .preparation import Preparation
from .source import SkippedImage, count_of, write_skipped_images
from .streaming import StreamingDataset
from .tables import open_dataset
from .transforms import (
    evaluation_transform,
    output_size,
    set_image_size,
    set_normalization,
    update_pretrained_cfg,
)
from .workers import cores, default_workers, threads

__all__ = [
    "AUGMENTATIONS",
    "LAYOUTS",
    "Augmentation",
    "BatchDataset",
    "BatchLoader",
    "BuiltDatasets",
    "ClassificationDataset",
    "HostBatch",
    "ImagePipeline",
    "Preparation",
    "SkippedImage",
    "Splits",
    "StreamingDataset",
    "UnreadableImageError",
    "balanced_class_weights",
    "batch_loader",
    "build_datasets",
    "channel_statistics",
    "cores",
    "count_of",
    "decode_image",
    "decode_pixels",
    "default_workers",
    "evaluation_transform",
    "find_duplicates",
    "fingerprint",
    "for_evaluation",
    "holds_batches",
    "is_converted",
    "known_classes",
    "known_labels",
    "known_preparation",
    "load_splits",
    "open_dataset",
    "open_folder",
    "output_size",
    "set_image_size",
    "set_normalization",
    "split_dataset",
    "stratified_rows",
    "threads",
    "to_device",
    "update_pretrained_cfg",
    "write_skipped_images",
]
