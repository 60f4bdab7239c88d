"""Stream datasets that are larger than disk and memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import IterableDataset

from ..errors import InputError
from ..metrics import IGNORED_LABEL
from .augmentation import Augmentation
from .batches import BatchDataset
from .columns import check_labels, count_classes, find_image_column, find_label_column
from .images import UnreadableImageError
from .preparation import Preparation
from .records import RawBatch, Record, Recorder
from .sources import Splits, check_limits, choose_splits, load_parts
from .unreadable import MAX_UNREADABLE_SHARE, UnreadableDataError, too_many
from .workers import threads

logger = logging.getLogger(__name__)

# Before so many images were seen, a share of them says little.
_ENOUGH = 2000


class StreamingDataset(BatchDataset, IterableDataset):
    """Give the images of a `datasets.IterableDataset` as a model's input, and keep none of them.

    Batches are decoded by threads, or on the GPU, while the training works on the one before. An image that can't be
    read is named and counted, and the next of its batch that can be stands in for it. A training on streams needs
    `max_steps`: their length is not known.

    Args:
        dataset (`datasets.IterableDataset`): The rows, such as `load_dataset(..., streaming=True)` gives.
        image_column (`str`): The column of images; they are decoded here.
        label_column (`str`): The column of class indices.
        preparation ([`Preparation`]): What is done to each image.
        augmentation ([`Augmentation`], *optional*): What is done to images in training.
        num_classes (`int`, *optional*): The number of classes, by default what the label column's `ClassLabel` says.
        name (`str`, *optional*, defaults to `"train"`): What messages call this dataset.
        evaluation (`bool`, *optional*, defaults to `False`): Whether rows come in their order, and stand-ins are
            labelled -100, which the loss and the metrics leave out.
        buffer_size (`int`, *optional*, defaults to 1,000): From so many undecoded rows the next is drawn in training.
        seed (`int`, *optional*, defaults to 42): Decides the draws.

    Raises:
        InputError: If `num_classes` is missing; from a batch's access, once more than 1 % of the images, and more
            than 20, could not be read.

    Example:

    ```python
    >>> stream = load_dataset("timm/imagenet-1k-wds", split="train", streaming=True)
    >>> data = StreamingDataset(stream, "jpg", "cls", Preparation(processor), Augmentation(), num_classes=1000)
    >>> EntameTrainer(model, args, train_dataset=data).train()
    ```
    """

    def __init__(
        self,
        dataset: datasets.IterableDataset,
        image_column: str,
        label_column: str,
        preparation: Preparation,
        augmentation: Augmentation | None = None,
        num_classes: int | None = None,
        name: str = "train",
        evaluation: bool = False,
        buffer_size: int = 1000,
        seed: int = 42,
    ):
        # Those of a generator or of WebDataset's archives show in the first rows only.
        dataset = dataset if dataset.features else dataset._resolve_features()
        num_classes = count_classes(dataset.features[label_column], label_column, num_classes)
        dataset = dataset.select_columns([image_column, label_column])
        self.dataset = dataset.cast_column(image_column, datasets.Image(decode=False))
        if not evaluation:
            self.dataset = self.dataset.shuffle(seed=seed, buffer_size=buffer_size)
        self.image_column, self.label_column = image_column, label_column
        self.recorder = Recorder(preparation, augmentation, num_classes)
        self.name, self.evaluation = name, evaluation
        self.seen = 0
        self.unreadable: list[str] = []
        self._spare: tuple[Any, int] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.dataset.set_epoch(self.epoch)
        for row, item in enumerate(self.dataset):
            yield {"row": row, "epoch": self.epoch, **item}

    def read(self, indices: list[Any], epoch: int = 0, device: torch.device | None = None) -> RawBatch:
        """Decode a batch of what iterating gives.

        Args:
            indices (`list[dict]`): the rows.
            epoch: is what the rows say.
            device (`torch.device`, *optional*): where the batch goes next. A CUDA device decodes what it can.

        Returns:
            [`RawBatch`]: the images and labels, on the host.

        Raises:
            InputError: If too many images can't be read, or none of the batch.
        """
        gpu = device if device is not None and device.type == "cuda" else None
        made = self._decode([item[self.image_column] for item in indices], gpu)
        for item, record in zip(indices, made, strict=True):
            if isinstance(record, UnreadableImageError):
                self._count(item, record)
        self.seen += len(indices)
        readable = np.array([not isinstance(record, UnreadableImageError) for record in made])
        if readable.any():
            places = np.flatnonzero(readable)
            chosen = places[np.searchsorted(places, np.arange(len(made))) % len(places)]
            pairs = [(made[i], indices[i][self.label_column]) for i in chosen]
            self._spare = pairs[-1]
        elif self._spare is not None:
            pairs = [self._spare] * len(made)
        else:
            raise UnreadableDataError(f"No image of the first batch can be read: {self.summary()}. Repair them.")
        labels = torch.tensor([label for _, label in pairs])
        check_labels(labels, self.recorder.num_classes, self.label_column)
        if self.evaluation:
            labels = labels.masked_fill(torch.from_numpy(~readable), IGNORED_LABEL)
        records = torch.empty(len(made), self.recorder.length, dtype=torch.uint8, pin_memory=gpu is not None)
        np.stack([record for record, _ in pairs], out=records.numpy())
        return RawBatch(records, labels, np.array([item["row"] for item in indices]), indices[0]["epoch"])

    def finish(self, batch: RawBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Augment and normalise a batch on a device: see [`Recorder.finish`]."""
        return self.recorder.finish(batch, device)

    def summary(self) -> str | None:
        """Tell which images could not be read so far: one line, `None` where all could."""
        if not self.unreadable:
            return None
        names = ", ".join([*itertools.islice(self.unreadable, 5), *["..."] * (len(self.unreadable) > 5)])
        return f"{len(self.unreadable):,} images could not be read and were skipped: {names}"

    def gather_unreadable(self) -> None:
        """Add what other processes could not read; to be called in all of them."""
        self.unreadable = list(dict.fromkeys(gather_object(self.unreadable)))

    def _decode(self, values: list[Any], gpu: torch.device | None) -> list[Record | UnreadableImageError]:
        made: dict[int, Record | UnreadableImageError] = {}
        if gpu is not None:
            for group, records in self.recorder.records_on_gpu(values, gpu):
                made.update(zip(group, records, strict=True))
        left = [i for i in range(len(values)) if i not in made]
        made.update(zip(left, threads().map(self.recorder.try_record, [values[i] for i in left]), strict=True))
        return [made[i] for i in range(len(values))]

    def _count(self, item: dict[str, Any], error: UnreadableImageError) -> None:
        image = item[self.image_column] or {}
        # Shuffled rows are numbered anew in each pass.
        shuffled = "" if self.evaluation else f"pass {item['epoch'] + 1} of "
        name = image.get("path") or f"row {item['row']} of {shuffled}{self.name}"
        if name in self.unreadable:
            return
        logger.warning("Skipping an image that cannot be read: %s (%s)", name, error)
        self.unreadable.append(name)
        if too_many(len(self.unreadable), max(self.seen, _ENOUGH)):
            raise UnreadableDataError(f"{self.summary()}. At most {MAX_UNREADABLE_SHARE:.0%} may be: repair them.")


def load_streams(
    *,
    dataset_name: str | None,
    dataset_config_name: str | None = None,
    image_column_name: str | None = None,
    label_column_name: str | None = None,
    train_split: str | None = None,
    eval_split: str | None = None,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    num_labels: int | None = None,
    **unused: Any,
) -> Splits:
    """Load the training and the evaluation part of a dataset as streams, of which nothing is kept.

    Args:
        dataset_name: and all others as for [`load_splits`]. Nothing can be set aside of a stream.
        num_labels (`int`, *optional*):
            How many classes there are, where the label column holds numbers without names, as WebDataset's does.

    Returns:
        [`Splits`]: The two parts, each a `datasets.IterableDataset`.

    Raises:
        InputError: If the dataset can't be loaded, has one part only, or doesn't name its classes.
    """
    check_limits(max_train_samples, max_eval_samples)
    if dataset_name is None:
        raise InputError("--streaming needs --dataset_name: an id on the Hub or a dataset's folder.")
    loaded = load_parts(dataset_name, dataset_config_name, streaming=True)
    names = choose_splits(loaded, train_split, eval_split)
    if None in names or names[0] == names[1]:
        raise InputError(
            "A stream can't be split: name both parts with --train_split and --eval_split; "
            f"splits: {', '.join(loaded)}."
        )
    parts = [loaded[name] for name in names]
    features = parts[0].features or parts[0]._resolve_features().features
    image_column = find_image_column(features, image_column_name)
    label_column = find_label_column(features, label_column_name)
    feature = features[label_column]
    if isinstance(feature, datasets.ClassLabel):
        class_names = list(feature.names)
    elif num_labels is not None and feature.dtype.startswith(("int", "uint")):
        class_names = [str(index) for index in range(num_labels)]
    else:
        raise InputError(
            f"Column {label_column!r} doesn't name its classes. Say how many numbers it holds with --num_labels 1000, "
            "or leave --streaming out where it holds names."
        )
    limits = (max_train_samples, max_eval_samples)
    train, evaluation = (p if limit is None else p.take(limit) for p, limit in zip(parts, limits, strict=True))
    return Splits(train, evaluation, class_names, image_column, label_column)
