"""Tell splits from classes in a folder of images."""

from __future__ import annotations

import os
from collections import Counter

from ..errors import InputError
from .source import listed
from .splits import TEST, TRAIN, UNLABELED, VALIDATION, find_parts, kind_of, normal, split_kinds
from .tree import Folder

CLASSES, SPLITS, CLASSES_OF_SPLITS = "CLASS", "SPLIT/CLASS", "CLASS/SPLIT"
LAYOUTS = ("auto", CLASSES, SPLITS, CLASSES_OF_SPLITS)
HOW = (
    "Put images in DATA_DIR/CLASS/, or in DATA_DIR/train/CLASS/ and DATA_DIR/test/CLASS/; or list the labels in "
    "DATA_DIR/metadata.csv, in columns file_name and label"
)

# Names of a folder in a split that holds the split's images, and no class.
_ALL_IMAGES = frozenset({"images", "image", "imgs", "img"})
_HOLDERS = _ALL_IMAGES | {"all", "unknown", "data", "photos"}


def unwrap(folder: Folder) -> tuple[Folder, list[str]]:
    """Go down through folders that hold one folder of folders; give the images beside these too."""
    strays: list[str] = []
    while len(folder.folders) == 1 and not folder.metadata:
        inside = folder.folders[0]
        if not (inside.filled or inside.metadata) or split_kinds([inside.name]):
            break
        strays += folder.files
        folder = inside
    return folder, strays


def unwrap_split(folder: Folder, classes: frozenset[str] = frozenset()) -> Folder:
    """Go down through folders that repeat the split's name, or hold nothing but its classes."""
    while len(folder.filled) == 1 and not folder.files:
        inside = folder.filled[0]
        holder = bool(split_kinds([inside.name])) or inside.name in (folder.name, *_HOLDERS)
        if normal(inside.name) in classes or not (holder or len(inside.filled) > 1):
            break
        folder = inside
    return folder


def class_names(folder: Folder, classes: frozenset[str] = frozenset()) -> frozenset[str]:
    """Give the names of a split's class folders."""
    return frozenset(normal(inside.name) for inside in unwrap_split(folder, classes).filled)


def has_classes(root: Folder) -> bool:
    """Tell whether there are folders that may be classes, right in a folder or in those of splits."""
    kinds = split_kinds(folder.name for folder in root.filled)
    inside = {name for folder in root.filled if folder.name in kinds for name in class_names(folder)}
    return len(root.filled) - len(kinds) > 1 or len(inside) > 1


def find_layout(root: Folder, layout: str, named: set[str]) -> tuple[str, dict[str, str]]:
    """Find whether the folders in a folder are splits or classes.

    Returns:
        `tuple[str, dict[str, str]]`: the layout, and which split each folder's name means, of those that mean one.

    Raises:
        InputError: If both could be meant.
    """
    inside = {folder.name: folder for folder in root.filled}
    kinds = split_kinds(inside)
    if layout == CLASSES_OF_SPLITS or (layout == "auto" and not named & inside.keys() and _splits_inside(root)):
        return CLASSES_OF_SPLITS, {}
    trains = [name for name, kind in kinds.items() if kind == TRAIN and class_names(inside[name])]
    if trains:
        kinds |= _relatives(inside, trains[0])
    if layout == SPLITS or (layout == "auto" and named & inside.keys()):
        return SPLITS, kinds
    if layout == CLASSES:
        return CLASSES, {}
    if trains:
        return _splits_or_classes(root, inside, kinds, trains[0]), kinds
    if kinds:
        _refuse_classes_beside(root, inside, kinds)
    else:
        _refuse_parts(root, inside)
        _refuse_repeated(root, inside)
        _refuse_splits_beside(root, inside)
    return CLASSES, {}


def _relatives(inside: dict[str, Folder], train: str) -> dict[str, str]:
    """Find folders that hold the classes of train and speak of a split: validation_matched."""
    classes = class_names(inside[train])
    kinds = {name: kind_of(name) for name in inside if classes & class_names(inside[name], classes)}
    return {name: kind for name, kind in kinds.items() if kind}


def _splits_or_classes(root: Folder, inside: dict[str, Folder], kinds: dict[str, str], train: str) -> str:
    """Decide where a folder called train holds folders."""
    strangers = [name for name in inside if name not in kinds]
    if not strangers:
        return SPLITS
    classes = class_names(inside[train])
    shared = {name: sorted(classes & class_names(inside[name], classes)) for name in inside if name != train}
    repeated = next(((name, names[0]) for name, names in shared.items() if names), None)
    # "train" with one folder in it, among others that hold something else: vehicles.
    if not repeated and len(classes) == 1:
        return CLASSES
    why = (
        f"{train} and {repeated[0]} both hold a folder {repeated[1]!r}, as splits do"
        if repeated
        else f"{train} holds folders, as a split does"
    )
    held = {kind for name, kind in kinds.items() if name != train and class_names(inside[name], classes)}
    likely = None if held else next((name for name in strangers if shared[name]), None)
    choose = f"`train_split={train}`" + (f" `eval_split={likely}`" if likely else "")
    raise InputError(
        f"In {root.path}, {why}, but no split is called {listed(strangers)}. If {train} is the split to train on, "
        f"give {choose}, and all others without a split's name are left out; if the folders are classes, give "
        f"`data_layout={CLASSES}`."
    )


def _refuse_classes_beside(root: Folder, inside: dict[str, Folder], kinds: dict[str, str]) -> None:
    """Refuse names of splits where no folder called train holds folders, unless they may be no splits."""
    strangers = [name for name in inside if name not in kinds]
    found, names = set(kinds.values()), listed(kinds)
    if not strangers:
        if all(class_names(inside[name]) for name in kinds):
            raise InputError(
                f"{root.path} holds the splits {names}, and none to train on. Choose one: "
                f"`train_split={next(iter(kinds))}`."
            )
        raise InputError(
            f"In {root.path}, the split to train on holds no class folders; folders: {names}. {HOW}. If the folders "
            f"are classes, give `data_layout={CLASSES}`."
        )
    # One folder called train is a vehicle; two such names are no coincidence.
    if found == {UNLABELED} or (found <= {TRAIN, UNLABELED} and len(kinds) == 1):
        return
    nested = [name for name in strangers if class_names(inside[name])]
    choose = f"give `train_split={nested[0]}`" if nested else "move the class folders into DATA_DIR/train/"
    verb = "has a name of a split" if len(kinds) == 1 else "have names of splits"
    raise InputError(
        f"{names} in {root.path} {verb} and may be classes beside {listed(strangers)}. If they are splits, {choose}; "
        f"if they are classes, give `data_layout={CLASSES}`."
    )


def _splits_inside(root: Folder) -> bool:
    """Tell whether each class folder holds splits: cat/train, cat/test, dog/train, dog/test."""
    names = {folder.name: [inside.name for inside in folder.filled] for folder in root.filled}
    kinds = {name: split_kinds(inside) for name, inside in names.items()}
    repeated = Counter(name for inside in kinds.values() for name in inside)
    with_train = [name for name, inside in kinds.items() if TRAIN in inside.values() and len(inside) > 1]
    if len(with_train) < 2 or max(repeated.values()) < 2:
        return False
    flat = [folder.name for folder in root.filled if not kinds[folder.name] and not split_kinds([folder.name])]
    if flat:
        raise InputError(
            f"In {root.path}, {with_train[0]} and {with_train[1]} hold splits, as classes with splits of their own "
            f"do, and {flat[0]} holds none. Put its images in {os.path.join(flat[0], 'train')}, or give "
            f"`data_layout={CLASSES}` to train on all splits."
        )
    _refuse_classes_inside(root)
    return True


def _refuse_classes_inside(root: Folder) -> None:
    """Refuse folders whose splits hold the same class folders: fold1/train/cat, fold2/train/cat."""
    seen: dict[str, str] = {}
    for folder in root.filled:
        held = {name for inside in folder.filled for name in class_names(inside)}
        repeated = [name for name in sorted(held) if name in seen]
        if len(repeated) > 1:
            other = seen[repeated[0]]
            raise InputError(
                f"In {root.path}, the splits of {other} and of {folder.name} hold the same folders "
                f"({listed(repeated)}). If these are the classes, train on one of them: `data_dir={folder.path}`; if "
                f"{other} and {folder.name} are the classes, give `data_layout={CLASSES_OF_SPLITS}`."
            )
        seen |= dict.fromkeys(held - seen.keys(), folder.name)


def _refuse_parts(root: Folder, inside: dict[str, Folder]) -> None:
    """Refuse folders that are called as splits of others: cat, cat_test, dog, dog_test. One may be a class."""
    parts = find_parts(inside)
    if len(parts) > 1:
        name, whole = next(iter(parts.items()))
        raise InputError(
            f"{listed(parts)} in {root.path} have names of splits of {listed(dict.fromkeys(parts.values()))}. If they "
            f"are, move {name} to DATA_DIR/{kind_of(name)}/{whole} and {whole} to DATA_DIR/train/{whole}, and so on; "
            f"if they are classes, give `data_layout={CLASSES}`."
        )


def _refuse_repeated(root: Folder, inside: dict[str, Folder]) -> None:
    """Refuse folders that all hold the same folders, which splits and classes may both do."""
    held = [class_names(folder) for folder in inside.values()]
    shared = frozenset.intersection(*held) if len(held) > 1 else frozenset()
    if len(shared) < 2 or not all(folder.holds_folders for folder in inside.values()):
        return
    first, second = list(inside)[:2]
    raise InputError(
        f"The folders of {root.path} ({listed(inside)}) all hold {listed(sorted(shared))}. If they are splits, "
        "say which: "
        f"`train_split={first}` `eval_split={second}`; if they are classes, give `data_layout={CLASSES}`."
    )


def refuse_repeated_classes(folders: list[Folder], layout: str) -> None:
    """Refuse a folder that holds nothing but folders, called as the classes beside it: a copy of all of them."""
    names = {normal(folder.name) for folder in folders}
    for folder in folders:
        repeated = sorted(names & {normal(inside.name) for inside in folder.filled} - {normal(folder.name)})
        if repeated and folder.holds_folders:
            raise InputError(
                f"{folder.path} holds {listed(repeated)}, as the classes beside it are called. If it is no class, "
                f"move it out of {os.path.dirname(folder.path)}; if it is one, give `data_layout={layout}`."
            )


def refuse_splits_in_classes(folders: list[Folder], layout: str) -> None:
    """Refuse splits in class folders, whose images would be trained on: cat/test beside the images of cat.

    A folder of such a name may hold images of the class as others do: one that lies among other folders, in one class.
    """
    held = {folder.name: split_kinds(inside.name for inside in folder.filled) for folder in folders}
    counts = Counter(name for kinds in held.values() for name in kinds)
    for folder in folders:
        kinds = held[folder.name]
        for name, kind in kinds.items():
            is_split = folder.files or counts[name] > 1 or len(set(kinds.values())) > 1
            if kind in (VALIDATION, TEST) and is_split:
                raise InputError(
                    f"{os.path.join(folder.path, name)} lies in the class folder {folder.name!r} and has the name of "
                    f"a split. If it is one, move its images to DATA_DIR/{name}/{folder.name}; if they are images of "
                    f"the class as all others, give `data_layout={layout}`."
                )


def refuse_splits_as_classes(classes: dict[str, set[str]], path: str) -> None:
    """Refuse a class of one split alone that has the name of another: train/test."""
    for split, names in classes.items() if len(classes) > 1 else ():
        others = {name for other, held in classes.items() if other != split for name in held}
        for name in sorted(names - others):
            if split_kinds([name]).get(name) in (VALIDATION, TEST):
                raise InputError(
                    f"{os.path.join(path, split, name)} has the name of a split, and no other split holds a class of "
                    f"this name. If it is a split, move it to {path}; if it is a class, give `data_layout={SPLITS}`."
                )


def refuse_folders_of_all_images(folders: list[Folder], layout: str) -> None:
    """Refuse a folder called images among the classes: it holds those of all, beside masks/ or annotations/."""
    for folder in folders:
        others = [other.name for other in folders if other is not folder and other.count]
        if folder.name.casefold() in _ALL_IMAGES and folder.files and others:
            raise InputError(
                f"{folder.path} holds {folder.count:,} images and no class folders, and lies beside {listed(others)}. "
                f"{HOW}. If these folders are the classes, give `data_layout={layout}`."
            )


def _refuse_splits_beside(root: Folder, inside: dict[str, Folder]) -> None:
    """Refuse one folder of splits among others, as where images/ lies beside masks/."""
    for folder in inside.values():
        kinds = split_kinds(inner.name for inner in folder.filled)
        if TRAIN in kinds.values() and len(set(kinds.values())) > 1:
            raise InputError(
                f"{folder.path} holds splits ({', '.join(kinds)}), and other folders lie beside it. If they are no "
                f"classes, give `data_dir={folder.path}`; if they are classes, give `data_layout={CLASSES}`."
            )
