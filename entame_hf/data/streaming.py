"""Stream datasets that are larger than disk and memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import InputError
from ..metrics import IGNORED_LABEL
from .augmentation import Augmentation
from .board import Files
from .columns import check_labels, count_classes
from .images import DecodedImage, UnreadableImageError
from .pipeline import HostBatch, ImagePipeline, PipelineDataset
from .preparation import Preparation
from .unreadable import UnreadableDataError, UnreadableNames
from .workers import Workers

# Rows that are read at a time.
_ROWS = 32


class StreamingDataset(PipelineDataset, IterableDataset):
    """Give the images of a `datasets.IterableDataset` as a model's input, and cache none of them.

    Threads or the GPU decode a batch while the model trains on the one before. An unreadable image is named and
    counted, and the next readable one of its batch stands in for it. Training needs `max_steps`: the length of a
    stream is not known.

    Args:
        dataset (`datasets.IterableDataset`): The rows, such as `load_dataset(..., streaming=True)` gives.
        image_column, label_column (`str`): The columns of images, which are decoded here, and of class indices.
        preparation, augmentation, name, num_classes: As for [`ClassificationDataset`].
        evaluation (`bool`, *optional*, defaults to `False`): Whether rows keep their order, and stand-ins are labelled
            -100, which the loss and the metrics ignore.
        buffer_size (`int`, *optional*, defaults to 1,000): Undecoded rows in the buffer that shuffles.
        seed (`int`, *optional*, defaults to 42): Decides the order.

    Raises:
        InputError: If `num_classes` is missing; when batches are read, if more than 1 % of the images, and more than
            20, or most of a class, and more than 5, are unreadable.

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
        # The first rows tell the features of generators and WebDataset archives.
        dataset = dataset if dataset.features else dataset._resolve_features()
        num_classes = count_classes(dataset.features[label_column], label_column, num_classes)
        dataset = dataset.select_columns([image_column, label_column])
        self.dataset = dataset.cast_column(image_column, datasets.Image(decode=False))
        if not evaluation:
            self.dataset = self.dataset.shuffle(seed=seed, buffer_size=buffer_size)
        self.image_column, self.label_column = image_column, label_column
        self.pipeline = ImagePipeline(preparation, augmentation, num_classes)
        self.name, self.evaluation = name, evaluation
        self.unreadable = UnreadableNames(num_classes)
        self._workers = Workers(self._decode, self.pipeline.length, read=self.pipeline.gpu_reader)
        self._spare: tuple[HostBatch, Tensor] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.dataset.set_epoch(self.epoch)
        if get_worker_info() is not None:
            # After a pass, `datasets` sleeps for 5 seconds: Arrow's threads may crash an interpreter that shuts down
            # (https://github.com/apache/arrow/issues/45214). A worker exits without shutting it down.
            datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
        row = 0
        # In a DataLoader's worker, the dataset itself would iterate in another order.
        for rows in self.dataset.iter(_ROWS):
            for values in zip(*rows.values(), strict=True):
                yield {"row": row, "epoch": self.epoch, **dict(zip(rows, values, strict=True))}
                row += 1

    def read(self, indices: list[Any], epoch: int = 0, device: torch.device | None = None) -> HostBatch:
        """Decode a batch of rows, as iterating gives them with their epoch; a CUDA `device` decodes common JPEGs."""
        return self.start_reading(indices, epoch, device)()

    def start_reading(
        self, indices: list[Any], epoch: int = 0, device: torch.device | None = None
    ) -> Callable[[], HostBatch]:
        """Start to decode a batch: see [`BatchDataset.start_reading`]."""
        classes = [item[self.label_column] for item in indices]
        if None in classes:
            raise InputError(
                f"A row of {self.name} has no label in column {self.label_column!r}. Remove such rows and write the "
                f"dataset again: `dataset.filter(lambda row: row[{self.label_column!r}] is not None)`."
            )
        labels = torch.tensor(classes)
        check_labels(labels, self.pipeline.num_classes, self.label_column)
        self.unreadable.count(labels)
        rows = np.array([item["row"] for item in indices])
        batch = HostBatch.allocate(rows, self.pipeline.length, indices[0]["epoch"], device)
        values, numbers = [item[self.image_column] for item in indices], np.arange(len(indices))
        pixels, ratios, on_gpu = batch.pixels.numpy(), batch.ratios.numpy(), self.decodes_on(device)
        decode = self._workers.start_decoding(pixels, ratios, numbers, numbers, values, on_gpu)

        def wait() -> HostBatch:
            readable = np.ones(len(values), bool)
            for i, error in self.pipeline.decode_on_gpu(batch, numbers, dict(decode()), device).items():
                readable[i] = False
                self._add_unreadable(indices[i], error)
            shown = labels if readable.all() else self._stand_in(batch, labels, readable)
            self._spare = batch, shown
            batch.labels = shown
            if self.evaluation:
                batch.labels = shown.masked_fill(torch.from_numpy(~readable), IGNORED_LABEL)
            return batch

        return wait

    def start_workers(self, count: int) -> None:
        """Start so many processes that decode."""
        self._workers.start(count)

    @property
    def files(self) -> Files:
        """Memory through which a process that reads rows hands over their files."""
        return self._workers.files

    def _decode(self, row: int, value: Any) -> DecodedImage | UnreadableImageError:
        return self.pipeline.decode(value)

    def _stand_in(self, batch: HostBatch, labels: Tensor, readable: NDArray[np.bool_]) -> Tensor:
        """Put the next readable image of the batch in the place of an unreadable one, or one of the batch before."""
        source, places = (batch, labels), np.flatnonzero(readable)
        if not len(places):
            if self._spare is None:
                raise UnreadableDataError(f"No image of the first batch can be read: {self.summary()}. Repair them.")
            source, places = self._spare, np.arange(len(self._spare[1]))
        chosen = places[np.searchsorted(places, np.arange(len(readable))) % len(places)]
        pixels, batch.on_device = source[0].pixels_on(torch.device("cpu")), None
        batch.pixels.copy_(pixels[chosen])
        batch.ratios.copy_(source[0].ratios[chosen])
        return source[1][chosen]

    def for_evaluation(self) -> StreamingDataset:
        """Give the same stream as evaluation sees its images: without augmentation, and stand-ins labelled -100."""
        if self.evaluation:
            return self
        view = copy.copy(self)
        view.pipeline = self.pipeline.for_evaluation()
        # What it reads is read again in training, and counts there.
        view.evaluation, view.unreadable = True, UnreadableNames(self.pipeline.num_classes)
        return view

    def _add_unreadable(self, item: dict[str, Any], error: UnreadableImageError) -> None:
        # Shuffled rows are numbered anew in each pass.
        shuffled = "" if self.evaluation else f"pass {item['epoch'] + 1} of "
        name = (item[self.image_column] or {}).get("path") or f"row {item['row']} of {shuffled}{self.name}"
        self.unreadable.add(name, item[self.label_column], error)
