"""Tell the examples of a dataset apart without reading an image: by their number, labels, names and sizes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from torch.utils.data import Subset, TensorDataset
from transformers.trainer_utils import has_length
from xxhash import xxh3_64

from .columns import image_files, label_values
from .dataset import ClassificationDataset
from .pipeline import PipelineDataset
from .preparation import Preparation
from .streaming import StreamingDataset


def known_labels(dataset: Any) -> NDArray[np.int64] | None:
    """Get the class of each example, int64 (N,), if that takes no look at the examples.

    A `datasets.Dataset` has them in "label" or "labels", datasets of torch or torchvision in `targets` or `labels`.
    """
    if isinstance(dataset, Subset):
        labels = known_labels(dataset.dataset)
        return None if labels is None else labels[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, datasets.Dataset):
        column = next((name for name in ("labels", "label") if name in dataset.column_names), None)
        values = None if column is None else label_values(dataset, column)
        if values is None or values.null_count or not pa.types.is_integer(values.type):
            return None
        return values.to_numpy().astype(np.int64)
    known: Any = dataset.tensors[-1] if isinstance(dataset, TensorDataset) else None
    known = next((getattr(dataset, name) for name in ("targets", "labels") if hasattr(dataset, name)), known)
    try:
        found = np.asarray(known)
    # Rows of different lengths, or a tensor on another device.
    except (TypeError, ValueError):
        return None
    is_index = found.ndim == 1 and found.dtype.kind in "iu"
    return found.astype(np.int64) if is_index and has_length(dataset) and len(found) == len(dataset) else None


def known_classes(dataset: Any) -> list[str] | None:
    """Get the names of a dataset's classes, by index, if it has them.

    A `datasets.Dataset` has them in the `ClassLabel` of "label" or "labels", datasets of torchvision in `classes`.
    """
    if isinstance(dataset, Subset):
        return known_classes(dataset.dataset)
    if isinstance(dataset, ClassificationDataset):
        return dataset.class_names
    if isinstance(dataset, datasets.Dataset):
        features = dataset.features
        feature = next((features[name] for name in ("labels", "label") if name in features), None)
        return list(feature.names) if isinstance(feature, datasets.ClassLabel) else None
    names = getattr(dataset, "classes", None)
    return list(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else None


def known_preparation(dataset: Any) -> Preparation | None:
    """Get how a dataset of this package prepares its images; `None` of others."""
    if isinstance(dataset, Subset):
        return known_preparation(dataset.dataset)
    return dataset.pipeline.preparation if isinstance(dataset, PipelineDataset) else None


def fingerprint(dataset: Any) -> dict[str, Any]:
    """Describe which examples a dataset has, in their order, wherever it lies.

    Returns:
        `dict`: `examples`, their number, and `hash`, `None` if nothing else is known. Of a stream, what is known of
            `dataset`, `columns` and `files`.
    """
    if not has_length(dataset):
        return _stream(dataset.dataset if isinstance(dataset, StreamingDataset) else dataset)
    labels = known_labels(dataset)
    known = [*([] if labels is None else [labels.tobytes()]), *_images(dataset)]
    return {"examples": len(dataset), "hash": _hash(known) if known else None}


def _stream(dataset: Any) -> dict[str, Any]:
    if not isinstance(dataset, datasets.IterableDataset):
        return {}
    info, split = dataset.info, str(dataset.split)
    counts = [str(s.num_examples) for name, s in (info.splits or {}).items() if name == split and s.num_examples]
    files = _files(dataset)
    found = {
        "dataset": " ".join(filter(None, [info.dataset_name, info.config_name, str(info.version), split, *counts])),
        "columns": str(dataset.features),
        "files": f"{len(files)} ({_hash(files)})" if files else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _files(source: Any) -> list[bytes]:
    """List what a stream reads: repository, revision and path, or the ends of paths and the sizes of local files."""
    if isinstance(source, str):
        size = os.path.getsize(source) if os.path.isfile(source) else ""
        return [source.encode() if "://" in source else _ends([source]) + f" {size}".encode()]
    if isinstance(source, datasets.IterableDataset):
        return _files(source._ex_iterable)
    if isinstance(source, dict | list | tuple):
        return [file for part in (source.values() if isinstance(source, dict) else source) for file in _files(part)]
    # Iterables that wrap one or several others, down to what reads files.
    parts = (getattr(source, name, None) for name in ("ex_iterable", "ex_iterables", "kwargs"))
    return [file for part in parts if part is not None for file in _files(part)]


def _hash(values: Iterable[bytes]) -> str:
    digest = xxh3_64()
    for value in values:
        digest.update(value)
    return digest.hexdigest()


def _images(dataset: Any) -> list[bytes]:
    """List what tells images apart: the ends of their paths, and the lengths of the files that tables hold."""
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, dtype=np.int64)
        return [indices.tobytes(), *_images(dataset.dataset)]
    if isinstance(dataset, ClassificationDataset):
        return _column(dataset.dataset, dataset.image_column)
    if isinstance(dataset, datasets.Dataset):
        images = [name for name, feature in dataset.features.items() if isinstance(feature, datasets.Image)]
        return [values for name in images for values in _column(dataset, name)]
    # torchvision's folders.
    return [_ends([path for path, _ in dataset.samples])] if hasattr(dataset, "samples") else []


def _column(dataset: datasets.Dataset, name: str) -> list[bytes]:
    lengths, paths = image_files(dataset, name)
    return [pc.fill_null(lengths, -1).to_numpy().tobytes(), _ends(paths.to_pylist())]


def _ends(paths: list[Any]) -> bytes:
    """Join the names of files and of their folders, which stay when a dataset is moved."""
    ends = ("/".join(str(path or "").replace("\\", "/").split("/")[-2:]) for path in paths)
    return "\n".join(ends).encode(errors="surrogateescape")
