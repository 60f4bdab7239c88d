"""Read folders of images, one folder a class."""

from __future__ import annotations

import os
import zipfile
from textwrap import shorten

import datasets

from ..errors import InputError
from .archives import unpack

IMAGE_SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".png", ".gif", ".bmp", ".webp", ".avif", ".tif", ".tiff"}
    | {".ppm", ".pgm", ".pbm"}
)

_SPLITS = {
    "train": "train",
    "validation": "validation",
    "val": "validation",
    "valid": "validation",
    "dev": "validation",
    "eval": "validation",
    "evaluation": "validation",
    "test": "test",
}

_LAYOUT = "Put images in DATA_DIR/CLASS/ or in DATA_DIR/train/CLASS/ and DATA_DIR/test/CLASS/"


def load_image_folder(data_dir: str | os.PathLike[str]) -> datasets.DatasetDict:
    """Scan a folder of images into datasets, without opening an image.

    Two layouts are read: `data_dir/CLASS/*.jpg`, which gives one split, "train", and
    `data_dir/{train,validation,test}/CLASS/*.jpg` ("val", "valid", "dev", "eval" and "evaluation" mean
    "validation"). Folders are splits only if all of data_dir's have such names, "train" among them, and hold
    folders themselves; otherwise they are classes. Images may lie deeper inside a class folder and links are
    followed; hidden files, `__MACOSX` and files without an image's suffix are ignored. Classes are sorted by name
    as plain strings: "10" before "2".

    Args:
        data_dir (`str` or `os.PathLike`):
            The folder, or a zip file of it, which is unpacked once.

    Returns:
        `datasets.DatasetDict`: Its splits, with the columns "image" (an undecoded `datasets.Image`) and
        "label" (a `datasets.ClassLabel`), in the order of classes and paths.

    Raises:
        InputError: If the folder can't be read, holds no image or one class only, if a class folder of train
            holds no image, if another split has a class that train lacks, or if a folder of another name lies
            beside splits.

    Example:

    ```python
    >>> load_image_folder("pets")["train"].features["label"].names
    ['cat', 'dog']
    ```
    """
    root = os.path.abspath(os.path.expanduser(data_dir))
    if os.path.isfile(root) and zipfile.is_zipfile(root):
        root = unpack(root, IMAGE_SUFFIXES)
    if not os.path.isdir(root):
        problem = "is a file, neither a folder nor a zip" if os.path.exists(root) else "does not exist"
        raise InputError(f"--data_dir {root} {problem}. Give a folder, or a zip, with one folder of images a class.")
    try:
        splits = {
            split: {name: _image_files(os.path.join(folder, name)) for name in _subfolders(folder)}
            for split, folder in _split_folders(root).items()
        }
    except OSError as error:
        raise InputError(f"--data_dir: cannot read {error.filename or root}: {error.strerror}.") from error

    names = _class_names(root, splits)
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=names)})
    try:
        return datasets.DatasetDict(
            {
                split: datasets.Dataset.from_dict(
                    {
                        "image": [path for name in names for path in classes.get(name, [])],
                        "label": [i for i, name in enumerate(names) for _ in classes.get(name, [])],
                    },
                    features=features,
                    split=datasets.NamedSplit(split),
                )
                for split, classes in splits.items()
            }
        )
    except UnicodeEncodeError as error:
        raise InputError(f"--data_dir: the file name {error.object!a} is not UTF-8. Rename it.") from error


def _split_folders(root: str) -> dict[str, str]:
    names = _subfolders(root)
    if "train" not in {name.lower() for name in names}:
        return {"train": root}
    if not {name.lower() for name in names} <= _SPLITS.keys():
        _refuse_splits(root, names)
        return {"train": root}
    folders = {name: os.path.join(root, name) for name in names}
    flat = [name for name, folder in folders.items() if not _subfolders(folder)]
    if len(flat) == len(folders):
        return {"train": root}
    # Taking these for classes would train a classifier of "train" against "test" without a word.
    if flat:
        raise InputError(f"{folders[flat[0]]} holds no class folders, others beside it do. {_LAYOUT}, or remove it.")
    splits: dict[str, str] = {}
    for name, folder in folders.items():
        other = splits.setdefault(_SPLITS[name.lower()], folder)
        if other != folder:
            raise InputError(f"{other} and {folder} are the same split. Keep one of the two.")
    return splits


def _refuse_splits(root: str, names: list[str]) -> None:
    """Refuse folders whose own folders repeat those of train: splits, which would be trained on as classes."""
    train = next(name for name in names if name.lower() == "train")
    classes = _subfolders(os.path.join(root, train))
    for other in names if classes else []:
        shared = sorted({*classes} & {*_subfolders(os.path.join(root, other))}) if other != train else []
        if shared:
            strange = ", ".join(name for name in names if name.lower() not in _SPLITS)
            raise InputError(
                f"{os.path.join(root, train)} and {other} beside it both hold a folder {shared[0]!r}, as splits do, "
                f"but no split is called {shorten(strange, 200, placeholder=' ...')}. Splits: {', '.join(_SPLITS)}. "
                f"Rename or remove the others; if {train!r} is a class, put its images right into its folder."
            )


def _class_names(root: str, splits: dict[str, dict[str, list[str]]]) -> list[str]:
    train = splits["train"]
    for split, classes in splits.items():
        if not any(classes.values()):
            where = root if len(splits) == 1 else f"{root}, split {split!r}"
            raise InputError(f"No image in a class folder of {where}. {_LAYOUT}; {_suffixes()}.")
    for name, files in train.items():
        if not files:
            raise InputError(
                f"Class folder {name!r} of {root} has no image to train on. Add some or remove it; {_suffixes()}."
            )
    if len(train) < 2:
        raise InputError(
            f"{root} has one class only, {next(iter(train))!r}; a classifier needs two or more. {_LAYOUT}."
        )
    for split, classes in splits.items():
        for name, files in classes.items():
            if files and name not in train:
                raise InputError(
                    f"Class {name!r} is in {split} but not in train of {root}. Add it to train or remove it."
                )
    return list(train)


def _suffixes() -> str:
    return f"suffixes read: {' '.join(sorted(IMAGE_SUFFIXES))}"


def _is_junk(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _subfolders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if not _is_junk(entry.name) and entry.is_dir())


def _image_files(folder: str) -> list[str]:
    files: list[str] = []
    pending, seen = [folder], set()
    while pending:
        current = pending.pop()
        # A link may lead back to a folder above it.
        status = os.stat(current)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(current) as entries:
            for entry in entries:
                if _is_junk(entry.name):
                    continue
                if entry.is_dir():
                    pending.append(entry.path)
                elif os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:
                    files.append(entry.path)
    return sorted(files)
