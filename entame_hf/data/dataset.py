"""Read images and labels of a dataset in batches, and skip images that can't be read."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import BaseImageProcessor

from ..metrics import IGNORED_LABEL
from .augmentation import Augmentation, Rows
from .batches import BatchDataset
from .cache import RecordCache, open_cache
from .columns import check_labels, count_classes, file_marks, label_values
from .images import UnreadableImageError
from .preparation import Preparation
from .records import RawBatch, Record, Recorder
from .unreadable import UnreadableRows
from .workers import start_workers, threads, work

logger = logging.getLogger(__name__)

# Images that a worker gets at a time.
_CHUNK = 8

# Share of the images with which the cache needs no workers.
_MOST = 0.9


class ClassificationDataset(BatchDataset):
    """Give the images of a `datasets.Dataset` as a model's input: single items, or batches at a device's pace.

    [`EntameTrainer`] reads it in batches: images are decoded and prepared by threads of this process and kept in a
    cache on disk, so that each is decoded once; augmentation and normalisation run in batches on the training
    device. Taken item by item, as any other `Trainer` does, it gives the same images, as long as whoever trains in
    several processes tells it the epoch ([`~ClassificationDataset.set_epoch`]).

    An image that can't be read is named in one warning, flagged, and not tried again. The next one that can be
    stands in for it, so that batches stay full and of one size on every process. The flags lie in shared memory:
    DataLoader workers and the main process see the same ones.

    Args:
        dataset (`datasets.Dataset`):
            The rows.
        image_column (`str`):
            The column of images; they are decoded here.
        label_column (`str`):
            The column of class indices.
        preparation ([`Preparation`]):
            What is done to each image before it is kept.
        augmentation ([`Augmentation`], *optional*):
            What is done to images in training. By default nothing.
        name (`str`, *optional*, defaults to `"train"`):
            What messages call this dataset.
        evaluation (`bool`, *optional*, defaults to `False`):
            Whether stand-ins are labelled -100, which the loss and the metrics leave out, so that nothing is
            counted twice.
        cache_gb (`float`, *optional*, defaults to 32):
            What all caches together may take on disk; 0 keeps nothing.
        num_classes (`int`, *optional*):
            The number of classes, by default what the label column's `ClassLabel` says.

    Raises:
        InputError: If `num_classes` is missing or too small; from an item's access, once more than 1 % of the images,
            and more than 5, could not be read.

    Example:

    ```python
    >>> data = ClassificationDataset(splits.train, "image", "label", Preparation(processor), Augmentation("flip"))
    >>> EntameTrainer(model, args, train_dataset=data).train()
    ```
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        image_column: str,
        label_column: str,
        preparation: Preparation,
        augmentation: Augmentation | None = None,
        name: str = "train",
        evaluation: bool = False,
        cache_gb: float = 32,
        num_classes: int | None = None,
    ):
        if isinstance(dataset.features[image_column], datasets.Image):
            dataset = dataset.cast_column(image_column, datasets.Image(decode=False))
        self.dataset = dataset
        self.image_column = image_column
        self.labels = torch.from_numpy(label_values(dataset, label_column).to_numpy().astype(np.int64))
        num_classes = count_classes(dataset.features[label_column], label_column, num_classes)
        check_labels(self.labels, num_classes, label_column)
        self.recorder = Recorder(preparation, augmentation, num_classes)
        self.name = name
        self.evaluation = evaluation
        self.unreadable = UnreadableRows(len(dataset), self._describe)
        self._cache_limit = round(cache_gb * 1e9)
        self._cache = self._open_cache()
        self._workers: ProcessPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # The end is where Python's loops stop.
        batch = self.finish(self.read([range(len(self))[index]], self.epoch))
        return {name: values[0] for name, values in batch.items()}

    def read(self, indices: list[int], epoch: int = 0, device: torch.device | None = None) -> RawBatch:
        """Read a batch: from the cache what it has, decoded what it has not.

        Args:
            indices (`list[int]`): the rows.
            epoch (`int`, *optional*, defaults to 0): what augmentations are drawn for.
            device (`torch.device`, *optional*): where the batch goes next. A CUDA device decodes what it can.

        Returns:
            [`RawBatch`]: the images and labels, on the host.

        Raises:
            InputError: If too many images can't be read.
        """
        asked = np.asarray(indices, dtype=np.int64)
        gpu = device if device is not None and device.type == "cuda" else None
        records = self._empty(len(asked), device)
        out, rows, todo = records.numpy(), asked.copy(), np.arange(len(asked))
        tried = np.empty(0, np.int64)
        # Each round takes from the cache what the one before put there, and the next row for one found unreadable.
        while len(todo):
            rows[todo] = self.unreadable.replace(asked[todo])
            todo = self._take(rows, todo, out)
            if len(todo) and np.array_equal(rows[todo], tried):
                # A disk on which other processes' writing doesn't show.
                self._cache = self._workers = None
            tried = rows[todo]
            if gpu is not None:
                todo, gpu = self._decode_on_gpu(rows, todo, out, gpu), None
            todo = self._decode(rows, todo, out)
        return RawBatch(records, self._labels(rows, asked), asked, epoch)

    def start_reading(self, indices: list[int], epoch: int, device: torch.device) -> Callable[[], RawBatch] | None:
        """Begin to copy a batch that the cache has all of: see [`BatchDataset.start_reading`]."""
        asked = np.asarray(indices, dtype=np.int64)
        rows = self.unreadable.replace(asked)
        if self._cache is None or not self._cache.has(rows).all():
            return None
        records = self._empty(len(asked), device)
        copies = self._cache.start_copying(rows, records.numpy())

        def wait() -> RawBatch:
            for part in copies:
                part.result()
            return RawBatch(records, self._labels(rows, asked), asked, epoch)

        return wait

    def finish(self, batch: RawBatch, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Augment and normalise a batch on a device: see [`Recorder.finish`]."""
        return self.recorder.finish(batch, device)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; processes that have little left to decode are let go."""
        if self._workers and epoch != self.epoch and self._has_most():
            self._stop_workers()
        super().set_epoch(epoch)

    def start_workers(self, count: int) -> None:
        """Let processes decode, unless the cache has most of the images already.

        Args:
            count (`int`): how many; 0 leaves it to threads of this process.
        """
        if self._has_most():
            self._stop_workers()
        elif count and not self._workers:
            self._workers = start_workers(self._decode_one, count)

    def with_processor(self, processor: BaseImageProcessor) -> ClassificationDataset:
        """Give the same images prepared by another processor; the flags are shared.

        Args:
            processor ([`~transformers.BaseImageProcessor`]): the processor.

        Returns:
            [`ClassificationDataset`]: The other view.
        """
        other = copy.copy(self)
        preparation = self.recorder.preparation.with_processor(processor)
        other.recorder = Recorder(preparation, self.recorder.augmentation, self.recorder.num_classes)
        other._cache, other._workers = other._open_cache(), None
        return other

    def summary(self) -> str | None:
        """Tell which images could not be read so far: one line, `None` where all could."""
        return self.unreadable.summary()

    def gather_unreadable(self) -> None:
        """Add what other processes could not read; to be called in all of them."""
        self.unreadable.gather()

    def _empty(self, count: int, device: torch.device | None) -> Tensor:
        """Make room for records; CUDA copies from pinned memory without being waited for."""
        pinned = device is not None and device.type == "cuda"
        return torch.empty(count, self.recorder.length, dtype=torch.uint8, pin_memory=pinned)

    def _labels(self, rows: Rows, asked: Rows) -> Tensor:
        labels = self.labels[rows]
        return labels.masked_fill(torch.from_numpy(rows != asked), IGNORED_LABEL) if self.evaluation else labels

    def _take(self, rows: Rows, todo: Rows, out: Record) -> Rows:
        """Copy what the cache has; return which positions are left."""
        if self._cache is None:
            return todo
        if len(todo) == len(rows):
            return self._cache.take(rows, out)
        part = np.empty((len(todo), out.shape[1]), np.uint8)
        missing = self._cache.take(rows[todo], part)
        out[todo] = part
        return todo[missing]

    def _decode_on_gpu(self, rows: Rows, todo: Rows, out: Record, device: torch.device) -> Rows:
        """Decode on a GPU what can be; return which positions are left."""
        if not len(todo) or self.recorder.preparation.framing is None:
            return todo
        left = np.ones(len(todo), bool)
        for group, records in self.recorder.records_on_gpu(self.dataset[rows[todo]][self.image_column], device):
            out[todo[group]] = records
            list(threads().map(self._keep, rows[todo[group]].tolist(), records))
            left[group] = False
        return todo[left]

    def _decode(self, rows: Rows, todo: Rows, out: Record) -> Rows:
        """Decode in processes or threads; return which positions were not written: kept now, or unreadable."""
        wanted = rows[todo].tolist()
        made: list[Record | UnreadableImageError | None] = []
        if self._workers:
            try:
                made = list(self._workers.map(work, wanted, chunksize=_CHUNK))
            except BrokenProcessPool:
                logger.warning(
                    "A process that decodes images was killed; is memory short? Threads go on in place of all of them."
                )
                self._workers = None
        if not self._workers:
            made = list(threads().map(self._decode_one, wanted))
        elif self.evaluation and self._has_most():
            # No epoch follows at whose start they would be let go.
            self._stop_workers()
        written = np.zeros(len(todo), bool)
        for i, record in enumerate(made):
            if isinstance(record, UnreadableImageError):
                self.unreadable.add(wanted[i], record)
            elif record is not None:
                out[todo[i]] = record
                written[i] = True
        return todo[~written]

    def _decode_one(self, row: int) -> Record | UnreadableImageError | None:
        """Decode a row; `None` where the cache keeps what comes of it."""
        record = self.recorder.try_record(self.dataset[row][self.image_column])
        if isinstance(record, UnreadableImageError):
            return record
        return None if self._keep(row, record) else record

    def _stop_workers(self) -> None:
        # Beside processes that were forked from it, the training's own is slower.
        if self._workers:
            self._workers.shutdown(wait=False)
            self._workers = None

    def _has_most(self) -> bool:
        return self._cache is not None and self._cache.share() >= _MOST

    def _keep(self, row: int, record: Record) -> bool:
        return self._cache is not None and self._cache.put(row, record)

    def _open_cache(self) -> RecordCache | None:
        marks = file_marks(self.dataset, self.image_column) if self._cache_limit > 0 else []
        parts = [
            version("entame-hf"),
            self.dataset._fingerprint,
            self.image_column,
            *marks,
            self.recorder.preparation.key,
        ]
        return open_cache(parts, len(self), self.recorder.length, self._cache_limit)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_workers": None}

    def _describe(self, index: int) -> str:
        image = self.dataset[index][self.image_column] or {}
        return image.get("path") or f"row {index} of {self.name}"
