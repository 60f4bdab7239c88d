"""Read a folder of images, or a zip file of one, as a table of paths and class names."""

from __future__ import annotations

import os
import zipfile

import datasets
from datasets import Dataset, Features, Value

from ..errors import InputError
from .archives import unpack
from .layout import (
    CLASSES,
    CLASSES_OF_SPLITS,
    HOW,
    LAYOUTS,
    find_layout,
    has_classes,
    refuse_folders_of_all_images,
    refuse_repeated_classes,
    refuse_splits_as_classes,
    refuse_splits_in_classes,
    unwrap,
    unwrap_split,
)
from .metadata import read_metadata, table
from .side_tables import compare_with_tables
from .source import Source, count_of, listed
from .splits import TRAIN, UNLABELED, find_splits, kind_of, normal, split_kinds
from .tree import Folder, scan

# The files of each class.
Classes = dict[str, list[str]]
COLUMNS = Features({"image": datasets.Image(decode=False), "label": Value("string")})


def open_folder(data_dir: str | os.PathLike[str], max_unzipped_gb: float | None = None) -> Folder:
    """Scan a folder, or unpack a zip file and scan what it holds."""
    root = os.path.abspath(os.path.expanduser(data_dir))
    if os.path.isfile(root) and zipfile.is_zipfile(root):
        root = unpack(root, max_unzipped_gb)
    if not os.path.isdir(root):
        problem = "is a file, neither a folder nor a zip" if os.path.exists(root) else "does not exist"
        raise InputError(
            f"`data_dir={root}` {problem}. Give a folder, or a zip file of one, with one folder of images a class."
        )
    folder = scan(root)
    # Such as train.zip beside test.zip. Beside images, a zip file is most often the one that they came in.
    return folder if folder.count else scan(root, lambda path: unpack(path, max_unzipped_gb))


def holds_tables(folder: Folder) -> bool:
    """Tell whether a folder holds Parquet, Arrow or tar files, and no folders of images."""
    return bool(folder.tables()) and not any(inside.count for inside in folder.folders)


def read_folder(
    root: Folder,
    *,
    train_split: str | None = None,
    eval_split: str | None = None,
    label_column_name: str | None = None,
    data_layout: str = "auto",
) -> Source:
    """Read the splits of a folder of images, without opening one.

    Returns:
        [`Source`]: A `datasets.Dataset` a split, of the columns "image" (an undecoded `datasets.Image`) and "label"
        (text), in the order of classes and paths.

    Raises:
        InputError: If there is no image in a class folder, or splits and classes can't be told apart.
    """
    if data_layout not in LAYOUTS:
        raise InputError(f"`data_layout={data_layout}`: no such layout. Layouts: {', '.join(LAYOUTS)}.")
    whole = root
    root, strays = unwrap(root)
    named = [name for name in (train_split, eval_split) if name]
    source = read_metadata(root, set(named), label_column_name, needed=not has_classes(root))
    if source is None:
        source = _read_classes(root, train_split, set(named), data_layout, whole)
        if files := [path for folder in root.walk() for path in folder.metadata]:
            source.notes.append(f"{files[0]} has no column called label: folders name the classes.")
    source.leave_out(strays, "", "beside the class folders", root.path)
    if others := root.other_suffixes():
        ordered = sorted(others.items(), key=lambda item: (-item[1], item[0]))
        kinds = ", ".join(f"{suffix} {count:,}" for suffix, count in ordered[:5])
        source.notes.append(f"{count_of(others.total(), 'file')} of other types ignored ({kinds}).")
    return source


def _read_classes(root: Folder, train_split: str | None, named: set[str], data_layout: str, whole: Folder) -> Source:
    layout, kinds = find_layout(root, data_layout, named)
    source = Source({}, f"DATA_DIR/{layout}")
    if layout == CLASSES:
        splits = {TRAIN: _classes(root.folders, source if data_layout == "auto" else None)}
    elif layout == CLASSES_OF_SPLITS:
        splits = _splits_of_classes(root, source)
    else:
        splits = _splits(root, kinds, train_split, named, source, known_only=data_layout == "auto")
    source.leave_out(root.files, "", "beside the class folders", root.path)
    if not any(files for classes in splits.values() for files in classes.values()):
        raise InputError(f"No image in a class folder of {root.path}. {HOW}.")
    for name, files in splits.get(TRAIN, {}).items():
        if not files:
            others = [folder.path for folder in root.filled]
            remedy = f", or give `data_dir={others[0]}`" if len(others) == 1 else ""
            raise InputError(
                f"Class folder {name!r} of {root.path} has no image to train on. Add some or remove it{remedy}."
            )
    if data_layout == "auto":
        filled = [pair for classes in splits.values() for pair in classes.items()]
        compare_with_tables(whole, {path: name for name, files in filled for path in files}, source)
    source.splits = {split: _table(classes) for split, classes in splits.items()}
    return source


def _table(classes: Classes) -> Dataset:
    """Make a table of the images of each class, in the order of classes and paths."""
    names = sorted(classes)
    labels = [name for name in names for _ in classes[name]]
    return table({"image": [path for name in names for path in classes[name]], "label": labels}, COLUMNS)


def _classes(folders: list[Folder], source: Source | None) -> Classes:
    """Read the images of each class; a source takes the folders whose names say that they have no labels."""
    classes: Classes = {}
    if source:
        layout = source.layout.removeprefix("DATA_DIR/")
        refuse_repeated_classes(folders, layout)
        refuse_folders_of_all_images(folders, layout)
        if layout == CLASSES:
            refuse_splits_in_classes(folders, layout)
    for folder in folders:
        if source and split_kinds([folder.name]).get(folder.name) == UNLABELED:
            source.leave_out(folder.images(), folder.name, "no labels", folder.path)
            continue
        # Two folders of one name, composed and decomposed, are one class.
        classes.setdefault(normal(folder.name), []).extend(folder.images())
    if source:
        nested = [folder for folder in folders if len(folder.filled) > 1 and folder.holds_folders]
        source.notes += [
            f"class {folder.name!r} holds {len(folder.filled):,} folders ({listed(f.name for f in folder.filled)}), "
            f"whose images are all of this class."
            for folder in nested[:3]
        ]
    return classes


def _splits(
    root: Folder, kinds: dict[str, str], train_split: str | None, named: set[str], source: Source, known_only: bool
) -> dict[str, Classes]:
    """Read the classes of folders that are splits; leave out those that have none, or no split's name."""
    folders = {folder.name: folder for folder in root.filled}
    chosen = [name for name in folders if name in named or kinds.get(name, UNLABELED) != UNLABELED or not known_only]
    train = train_split or next(iter(find_splits(chosen, TRAIN)), None)
    known: frozenset[str] = frozenset()
    if train in folders:
        known = frozenset(normal(folder.name) for folder in unwrap_split(folders[train]).filled)
    splits = {}
    for name, folder in folders.items():
        inner = unwrap_split(folder, known if name != train else frozenset())
        if name not in chosen or kind_of(name) == UNLABELED or not inner.filled:
            if name in named:
                raise InputError(f"{folder.path} holds no class folders. {HOW}, or name another split.")
            source.leave_out(folder.images(), name, "no labels", folder.path)
            continue
        splits[name] = _classes(inner.folders if name == train else inner.filled, source if known_only else None)
        source.leave_out(inner.files, name, "beside the class folders", inner.path)
    if known_only:
        refuse_splits_as_classes({name: {*classes} for name, classes in splits.items()}, root.path)
    return splits


def _splits_of_classes(root: Folder, source: Source) -> dict[str, Classes]:
    splits: dict[str, Classes] = {}
    for folder in root.filled:
        kinds = split_kinds(inside.name for inside in folder.filled)
        if not kinds:
            source.leave_out(folder.images(), folder.name, "no labels", folder.path)
            continue
        for inside in folder.filled:
            if kinds.get(inside.name, UNLABELED) == UNLABELED:
                source.leave_out(inside.images(), inside.name, "no labels", inside.path)
            else:
                splits.setdefault(inside.name, {}).setdefault(normal(folder.name), []).extend(inside.images())
        source.leave_out(folder.files, "", "beside the folders of splits", folder.path)
    return splits
