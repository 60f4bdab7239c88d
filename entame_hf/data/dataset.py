"""Read images and labels of a dataset in batches, and skip images that cannot be read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BaseImageProcessor

from ..metrics import IGNORED_LABEL
from .augmentation import Augmentation, Rows
from .cache import ImageCache, file_marks, mark_files, open_cache
from .columns import check_labels, count_classes, label_indices, label_shares, row_number
from .images import DecodedImage, UnreadableImageError
from .pipeline import HostBatch, ImagePipeline, Keep, PipelineDataset
from .preparation import Preparation
from .unreadable import UnreadableRows
from .workers import Workers

# Workers stop once this fraction of the images is cached.
_MOST = 0.9


class ClassificationDataset(PipelineDataset):
    """Give the images of a `datasets.Dataset` as a model's input, item by item or in batches at a device's pace.

    [`EntameTrainer`] reads batches: threads, worker processes or the GPU decode each image once, a cache on disk keeps
    it, and augmentation and normalisation run in batches on the training device. Items are the same images; whoever
    reads them in several processes calls [`~ClassificationDataset.set_epoch`].

    An image that cannot be read is named in a warning and not tried again; the next readable one stands in for it, so
    that batches keep one size on every rank. DataLoader workers and the main process share what is known.

    Args:
        dataset (`datasets.Dataset`): The rows.
        image_column, label_column (`str`): The columns of images, which are decoded here, and of class indices.
        preparation ([`Preparation`]): What is done to each image before it is cached.
        augmentation ([`Augmentation`], *optional*): What is done to images in training. By default nothing.
        name (`str`, *optional*, defaults to `"train"`): What messages call this dataset.
        evaluation (`bool`, *optional*, defaults to `False`): Whether stand-ins are labelled -100, which the loss and
            the metrics ignore, so that no image counts twice.
        cache_gb (`float`, *optional*, defaults to 32): Disk space for all caches together; 0 caches nothing.
        num_classes (`int`, *optional*): The number of classes, by default that of the label column's `ClassLabel`.

    Raises:
        InputError: If `num_classes` is missing or too small; when images are read, if more than 1 % of them, and more
            than 5, or most of a class are unreadable.

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
        # Other columns take their time to read.
        self._images = dataset.select_columns([image_column])
        self.image_column = image_column
        self.labels = torch.from_numpy(label_indices(dataset, label_column))
        shares = None if evaluation else label_shares(dataset, label_column, name)
        self._targets = self.labels if shares is None else torch.from_numpy(shares.copy())
        feature = dataset.features[label_column]
        num_classes = count_classes(feature, label_column, num_classes)
        check_labels(self.labels, num_classes, label_column)
        self.pipeline = ImagePipeline(preparation, augmentation, num_classes)
        self.name = name
        self.evaluation = evaluation
        self.class_names = list(feature.names) if isinstance(feature, datasets.ClassLabel) else None
        shown = self.class_names or [str(i) for i in range(num_classes)]
        self.unreadable = UnreadableRows(self.labels, shown, self.describe, self._reason)
        self._cache_limit = round(cache_gb * 1e9)
        self._cache = self._open_cache()
        self._workers = self._new_workers()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        # range raises the IndexError that ends Python's loops.
        batch = self.finish(self.read([range(len(self))[index]], self.epoch))
        return {name: values[0] for name, values in batch.items()}

    def read(self, indices: list[int], epoch: int = 0, device: torch.device | None = None) -> HostBatch:
        """Read a batch from the cache, and decode the images that are not cached, common JPEGs on a CUDA `device`."""
        return self.start_reading(indices, epoch, device)()

    def start_reading(
        self, indices: list[int], epoch: int = 0, device: torch.device | None = None
    ) -> Callable[[], HostBatch]:
        """Read what is cached and start to decode the other images: see [`BatchDataset.start_reading`]."""
        asked = np.asarray(indices, dtype=np.int64)
        batch = HostBatch.allocate(asked, self.pipeline.length, epoch, device)
        rows = self.unreadable.replace(asked).copy()
        left = self._read_cached(rows, np.arange(len(asked)), batch)
        decode = self._start_decoding(rows, left, batch, device)

        def wait() -> HostBatch:
            todo = decode()
            # Each round reads the next row for each that the one before found unreadable.
            while len(todo):
                rows[todo] = self.unreadable.replace(asked[todo])
                todo = self._start_decoding(rows, self._read_cached(rows, todo, batch), batch)()
            return self._label(batch, rows)

        return wait

    def start_copying(self, indices: list[int], epoch: int, device: torch.device) -> Callable[[], HostBatch] | None:
        """Start to copy a batch that is cached: see [`BatchDataset.start_copying`]."""
        asked = np.asarray(indices, dtype=np.int64)
        rows = self.unreadable.replace(asked)
        if self._cache is None or not self._cache.has(rows).all():
            return None
        batch = HostBatch.allocate(asked, self.pipeline.length, epoch, device)
        batch.ratios.numpy()[:] = self._cache.index["ratio"][rows]
        copies = self._cache.start_copying(rows, batch.pixels.numpy())

        def wait() -> HostBatch:
            damaged = [position for part in copies for position in part.result()]
            return self.read(indices, epoch, device) if damaged else self._label(batch, rows)

        return wait

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next. Workers stop once little is left to decode."""
        if epoch != self.epoch and self._has_most():
            self._workers.stop()
        super().set_epoch(epoch)

    def start_workers(self, count: int) -> None:
        """Start so many processes that decode, unless most images are cached."""
        if self._has_most():
            self._workers.stop()
        else:
            self._workers.start(count)

    def with_processor(self, processor: BaseImageProcessor) -> ClassificationDataset:
        """Give the same images prepared by another processor; both know the same unreadable images."""
        other = copy.copy(self)
        preparation = self.pipeline.preparation.with_processor(processor)
        other.pipeline = ImagePipeline(preparation, self.pipeline.augmentation, self.pipeline.num_classes)
        other._cache = other._open_cache()
        other._workers = other._new_workers()
        return other

    def for_evaluation(self) -> ClassificationDataset:
        """Give the same images as evaluation sees them: without augmentation, labelled by their largest share."""
        if self.evaluation:
            return self
        view = self._without_augmentation()
        view._targets = self.labels
        return view

    def _without_augmentation(self) -> ClassificationDataset:
        view = copy.copy(self)
        view.pipeline = self.pipeline.for_evaluation()
        view.evaluation, view._workers = True, view._new_workers()
        return view

    @contextmanager
    def evaluation_view(self) -> Iterator[ClassificationDataset]:
        """Show the same images as evaluation sees them, with stand-ins labelled -100; cache and flags are shared."""
        view = self._without_augmentation()
        try:
            yield view
        finally:
            view._workers.stop()

    def content_hashes(self) -> NDArray[np.uint64]:
        """Return a hash of each image's file: uint64 (N,), 0 for images that are not cached."""
        return np.zeros(len(self), np.uint64) if self._cache is None else self._cache.index["content"]

    def describe(self, row: int) -> str:
        """Name a row's image by its path, or by its number in the table that the rows were chosen from."""
        image = self.dataset[row][self.image_column]
        path = image.get("path") if isinstance(image, dict) else image
        return path if isinstance(path, str) else f"row {row_number(self.dataset, row)} of {self.name}"

    def _label(self, batch: HostBatch, rows: Rows) -> HostBatch:
        batch.labels = self._targets[rows]
        if self.evaluation:
            batch.labels = batch.labels.masked_fill(torch.from_numpy(rows != batch.rows), IGNORED_LABEL)
        return batch

    def _read_cached(self, rows: Rows, todo: Rows, batch: HostBatch) -> Rows:
        """Copy what is cached; return the positions that are left."""
        if self._cache is None:
            return todo
        out = batch.pixels.numpy() if len(todo) == len(rows) else np.empty((len(todo), self.pipeline.length), np.uint8)
        here = self._cache.read(rows[todo], out)
        if len(todo) < len(rows):
            batch.pixels.numpy()[todo[here]] = out[here]
        batch.ratios.numpy()[todo[here]] = self._cache.index["ratio"][rows[todo[here]]]
        return todo[~here]

    def _start_decoding(
        self, rows: Rows, todo: Rows, batch: HostBatch, device: torch.device | None = None
    ) -> Callable[[], Rows]:
        """Start to decode images, or to read them where a GPU decodes; return what waits and gives what is left to do.

        Workers share memory for whole batches: without a `device`, few images are left, which threads decode.
        """
        if not len(todo):
            return lambda: todo
        workers = self._workers if device is not None else self._new_workers()
        pixels, ratios, on_gpu = batch.pixels.numpy(), batch.ratios.numpy(), self.decodes_on(device)
        start = workers.start_decoding(pixels, ratios, todo, rows[todo], for_gpu=on_gpu)

        def wait() -> Rows:
            errors = self.pipeline.decode_on_gpu(batch, todo, dict(start()), device, self._keeper(rows[todo]))
            if self.evaluation and self._has_most():
                # No epoch follows at whose start they would stop.
                self._workers.stop()
            for i, error in errors.items():
                self.unreadable.add(int(rows[todo[i]]), error)
            return todo[[*errors]]

        return wait

    def _decode_row(self, row: int, value: Any) -> DecodedImage | UnreadableImageError:
        """Decode a row's image, and cache it."""
        image = self.pipeline.decode(value)
        if self._cache is not None and isinstance(image, DecodedImage):
            self._cache.write(row, image)
        return image

    def _fetch(self, rows: Rows) -> list[Any]:
        return self._images[rows][self.image_column]

    def _new_workers(self) -> Workers:
        return Workers(self._decode_row, self.pipeline.length, self._fetch, self.pipeline.gpu_reader)

    def _has_most(self) -> bool:
        return self._cache is not None and self._cache.fraction() >= _MOST

    def _keeper(self, rows: Rows) -> Keep | None:
        cache = self._cache
        # Without room in the cache, images that a GPU decoded are not copied back.
        if cache is None or rows.min() >= cache.kept:
            return None
        return lambda images: cache.start_writing({int(rows[i]): image for i, image in images.items()})

    def _open_cache(self) -> ImageCache | None:
        # Of a generator that gives other images now, the fingerprint stays.
        tables = [file["filename"] for file in self.dataset.cache_files]
        marks = [*file_marks(self.dataset, self.image_column), mark_files(tables)] if self._cache_limit > 0 else []
        parts = [version("entame-hf"), self.dataset._fingerprint, self.image_column, *marks]
        parts.append(self.pipeline.preparation.key)
        return open_cache(parts, len(self), self.pipeline.length, self._cache_limit)

    def _reason(self, row: int) -> str:
        image = self.pipeline.decode(self.dataset[row][self.image_column])
        return str(image) if isinstance(image, UnreadableImageError) else "could not be read in another process"
