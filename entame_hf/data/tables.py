"""Open datasets of the Hub or of a local folder, with the class names that each file has for its labels."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from itertools import groupby
from textwrap import shorten
from typing import Any, NoReturn
from urllib.parse import unquote

import datasets
import fsspec
import pyarrow.parquet as pq
from datasets import ClassLabel, Features, Image
from datasets.load import dataset_module_factory
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub import snapshot_download
from pyarrow.dataset import ParquetFragmentScanOptions

from ..errors import InputError
from .folders import open_folder, read_folder
from .images import LFS_POINTER
from .labels import recode
from .source import Rows, SkippedImage, Source, count_of, listed
from .splits import split_kinds
from .tree import Folder, scan, suffix_of
from .workers import threads

_ON_THE_HUB = re.compile(r"hf://datasets/([^@]+)@([^/]+)/(.+)")

# The number at the end of a file's name.
_SHARD = re.compile(r"([-_.]\d+[-_]of[-_]\d+.*|[-_.]?\d+)$")

# The class names of each label column of a file; None where its labels are numbers without names.
Names = dict[str, tuple[str, ...] | None]


def open_dataset(
    name: str,
    config: str | None = None,
    streaming: bool = False,
    read_images: Callable[[Folder], Source] = read_folder,
) -> Source:
    """Open all splits of a dataset of the Hub, of a local folder of Parquet, or saved by `save_to_disk`.

    Labels have the indices of one list of names in all files of a split, even where the files order their classes
    differently. `read_images` reads a repository of image files once it is on disk.

    Raises:
        InputError: If it can't be opened, or files have labels that can't be matched by name.
    """
    try:
        if _is_saved(name):
            saved = datasets.load_from_disk(name)
            loaded: Any = saved if isinstance(saved, dict) else {"train": saved}
            if streaming:
                loaded = {split: rows.to_iterable_dataset() for split, rows in loaded.items()}
            return Source({str(split): rows for split, rows in loaded.items()}, "saved dataset")
        builder = datasets.load_dataset_builder(name, config)
        explicit = bool(dataset_module_factory(name).builder_configs_parameters.metadata_configs)
        if isinstance(builder, ImageFolder) and not os.path.isdir(name):
            folder = _download_images(builder, explicit)
            if folder.count:
                if streaming:
                    refuse_streaming(name)
                return read_images(folder)
        left: list[str] = []
        if not explicit and builder.config.data_files:
            builder, left = _name_splits(builder, name)
        own = _names_of_files(builder)
        if _differ(own, builder.info.features):
            layout = "Parquet files of different class order"
            source = Source(_load_by_file(own, builder.info.features, streaming), layout)
        else:
            if streaming:
                if own:
                    vars(builder.config).update(_streaming_options(next(iter(own.values()))[0][0]))
                loaded = builder.as_streaming_dataset()
            else:
                builder.download_and_prepare()
                loaded = builder.as_dataset()
            layout = "local dataset" if os.path.isdir(name) else "Hub dataset"
            source = Source({str(split): rows for split, rows in loaded.items()}, layout)
        if left:
            reason = "its name is no split's"
            source.notes.append(f"{count_of(len(left), 'file')} of tables left out: {reason} ({listed(left)}).")
            source.skipped += [SkippedImage(path, "", reason) for path in left]
        return source
    except InputError:
        raise
    # Whatever fails in there (network, permissions, parsing), it is the named dataset that can't be used.
    except Exception as error:
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        reason = shorten(_without_secrets(str(cause or error)) or type(error).__name__, 400, placeholder=" ...")
        if pointer := _lfs_pointer(name):
            reason = f"{pointer} is a Git LFS pointer instead of the table: run git lfs pull"
        asked = f"`dataset_name={name}`" + (f" `dataset_config_name={config}`" if config else "")
        raise InputError(
            f"Cannot load {_without_secrets(asked)}: {reason.rstrip('.')}. Give the id of a dataset on the Hub (after "
            "`hf auth login` where it is private) or a local folder, and a `dataset_config_name` that it has."
        ) from error


def _lfs_pointer(name: str) -> str | None:
    """Find a table in a folder that git left to Git LFS."""
    for path in scan(name).tables() if os.path.isdir(name) else ():
        with open(path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                return path
    return None


def refuse_streaming(name: str) -> NoReturn:
    """Refuse to stream files of images."""
    raise InputError(
        f"`streaming`: {name} holds files of images, and only tables are streamed. Leave `streaming` out, or write "
        "it as Parquet with `Dataset.push_to_hub`."
    )


def _download_images(builder: Any, explicit: bool) -> Folder:
    """Download a repository of images: all of it, or the files that its card names for the configuration."""
    paths = [path for files in builder.config.data_files.values() for path in files]
    repository, revision, _ = _ON_THE_HUB.fullmatch(paths[0]).groups()  # type: ignore[union-attr]
    wanted = [glob.escape(_ON_THE_HUB.sub(r"\3", path)) for path in paths] if explicit else None
    return open_folder(
        snapshot_download(repository, repo_type="dataset", revision=unquote(revision), allow_patterns=wanted)
    )


def _name_splits(builder: Any, name: str) -> tuple[Any, list[str]]:
    """Assign files to splits by the table of names; give a builder of these splits, and the files of none.

    `datasets` takes eval for test, and holdout for none.
    """
    own = {path: str(split) for split, paths in builder.config.data_files.items() for path in paths}
    paths = list(own)
    if os.path.isdir(name):
        suffixes = {suffix_of(path) for path in own}
        paths = [path for path in scan(name).tables() if suffix_of(path) in suffixes] or paths
    # Folders of the innermost first, after the file's own name without the number of its shard.
    parts = {
        path: [_SHARD.sub("", os.path.splitext(os.path.basename(path))[0]), *path.split("/")[-2::-1]] for path in paths
    }
    shared = set.intersection(*(set(part[1:]) for part in parts.values()))
    kinds = split_kinds({part for found in parts.values() for part in found if part not in shared})
    splits: dict[str, list[str]] = {}
    left = []
    for path, found in parts.items():
        split = next((part for part in found if part in kinds), own.get(path))
        if split is None:
            left.append(path)
        else:
            splits.setdefault(re.sub(r"\W+", "_", split), []).append(path)
    if not left and splits == {str(split): list(files) for split, files in builder.config.data_files.items()}:
        return builder, []
    kind = type(builder).__module__.rpartition(".")[2]
    return datasets.load_dataset_builder(kind, data_files=splits, features=builder.info.features), left


def _is_saved(name: str) -> bool:
    return any(os.path.isfile(os.path.join(name, file)) for file in ("dataset_dict.json", "state.json"))


def _without_secrets(text: str) -> str:
    text = re.sub(r"(https?://)[^/\s@]+@", r"\1", text)
    text = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)
    return re.sub(r"hf_[A-Za-z0-9]{16,}", "hf_***", text)


def _streaming_options(path: str) -> dict[str, Any]:
    """Say how to read Parquet as a stream, of which a shuffle reads ten files at a time.

    From the disk, a few rows at a time: row groups may hold 100 MB, and to allocate them anew takes as long as to read
    them. From a network, whole row groups, and the next one ahead.
    """
    remote = "://" in path
    how = ParquetFragmentScanOptions(pre_buffer=remote, use_buffered_stream=not remote, buffer_size=2**20)
    return {"fragment_scan_options": how, "batch_size": 100}


def _names_of_files(builder: Any) -> dict[str, list[tuple[str, Names]]]:
    """Read the class names of each Parquet file of each split: `datasets` applies the first file's to all others."""
    if not isinstance(builder, Parquet) or not builder.config.data_files:
        return {}
    files = builder.config.data_files.items()
    return {str(split): list(zip(paths, threads().map(_names_of_file, paths), strict=True)) for split, paths in files}


def _names_of_file(path: str) -> Names:
    # Footers alone are read, from the Hub too.
    with fsspec.open(path, "rb") as file:
        features = Features.from_arrow_schema(pq.read_schema(file))
    names: Names = {}
    for column, feature in features.items():
        if isinstance(feature, ClassLabel):
            names[column] = tuple(feature.names)
        elif isinstance(feature, datasets.Value) and feature.dtype.startswith(("int", "uint")):
            names[column] = None
    return names


def _differ(own: dict[str, list[tuple[str, Names]]], declared: Features | None) -> bool:
    """Tell whether files have other indices for their labels than `datasets` would take; refuse what can't be told."""
    files = [file for split in own.values() for file in split]
    differ = False
    for column in dict.fromkeys(column for _, names in files for column, known in names.items() if known):
        found = {names[column]: path for path, names in files if column in names}
        named = {names: path for names, path in found.items() if names is not None}
        card = declared[column].names if declared and isinstance(declared.get(column), ClassLabel) else None
        if None in found and card is None:
            raise InputError(
                f"Column {column!r} of {found[None]} holds numbers without names, and {next(iter(named.values()))} "
                "names its classes. Write both with the same `datasets.ClassLabel`, or both with the names themselves."
            )
        # Names that a dataset card gives in place of the files' are the author's own renaming.
        renamed = card is not None and len(named) == 1 and set(card) != set(next(iter(named)))
        differ |= not renamed and len({*named, *([tuple(card)] if card else [])}) > 1
    return differ


def _load_by_file(
    own: dict[str, list[tuple[str, Names]]], declared: Features | None, streaming: bool
) -> dict[str, Rows]:
    """Load neighbouring files of the same names together, each with its own names, and recode by the first's."""
    splits: dict[str, Rows] = {}
    reference: Features | None = declared
    for split, files in own.items():
        parts: list[Any] = []
        for _, group in groupby(files, key=lambda file: sorted(file[1].items(), key=str)):
            (path, names), *more = group
            nameless = [c for c, f in (declared or {}).items() if isinstance(f, ClassLabel) and names.get(c) is None]
            part: Any = datasets.load_dataset(
                "parquet",
                data_files={"train": [path, *(other for other, _ in more)]},
                split="train",
                streaming=streaming,
                features=declared if nameless else None,
                **(_streaming_options(path) if streaming else {}),
            )
            for column, feature in part.features.items():
                if isinstance(feature, Image):
                    part = part.cast_column(column, Image(decode=False))
            reference = reference or part.features
            for column, feature in reference.items():
                if isinstance(feature, ClassLabel) and isinstance(part.features.get(column), ClassLabel):
                    part = recode(part, column, feature, f"{split} ({path})", "the first file")
            parts.append(part)
        splits[split] = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    return splits
