"""Which names mean which split: one table for folders, zip files, Parquet, the Hub and streams."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable

from ..errors import InputError

TRAIN, VALIDATION, TEST, UNLABELED = "train", "validation", "test", "unlabeled"

# A column that says which split a row belongs to.
SPLIT_COLUMN = "split"
# What others call it.
_SPLIT_COLUMNS = frozenset({"split", "splits", "set", "subset", "partition", "usage", "fold", "phase"})
_WORDS = {
    TRAIN: "train training trn",
    VALIDATION: "validation val valid validate validating dev devel development eval evaluation holdout heldout",
    TEST: "test testing tst",
    UNLABELED: "unlabeled unlabelled unsupervised unsup unannotated pred predict prediction predictions inference",
}
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words.split()}

# Words beside a split's name that change nothing: train_set, val2017, TestImages, test1.
_PLAIN = re.compile("sets?|data(set)?|split|folder|images?|imgs?|photos?|pictures?|pics?")
_ENDINGS = ("set", "data", "images", "imgs", "img")


def normal(name: str) -> str:
    """Give a name in Unicode's composed form (NFC): the same name, whatever the file system made of it."""
    return unicodedata.normalize("NFC", name)


def _parse(name: str) -> tuple[str | None, frozenset[str]]:
    """Find which split a name means, and the words of it that say something else."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\D)(?=\d)|(?<=\d)(?=\D)", " ", normal(name))
    text = re.sub(r"(held|hold)[\W_]+out", r"\1out", text.casefold())
    words = [word for word in re.split(r"[\W_]+", text) if word and not word.isdigit()]
    for ending in _ENDINGS:
        words = [w.removesuffix(ending) if w.removesuffix(ending) in _KINDS else w for w in words]
    kinds = {_KINDS[word] for word in words if word in _KINDS}
    rest = frozenset(word for word in words if word not in _KINDS and not _PLAIN.fullmatch(word))
    if UNLABELED in kinds:
        return UNLABELED, rest
    # VOC's "trainval" is for training.
    if kinds == {TRAIN, VALIDATION} or words == ["trainval"]:
        return TRAIN, rest - {"trainval"}
    return (kinds.pop() if len(kinds) == 1 else None), rest


def split_kinds(names: Iterable[str]) -> dict[str, str]:
    """Find which names of folders that lie side by side mean splits, and which: "train", "test", "unlabeled"...

    A name means a split if it says nothing else (`train`, `val2017`, `test_set`), or if another split's name beside
    it says the same else (`seg_train` beside `seg_test`).
    """
    parsed = {name: (kind, rest) for name in names for kind, rest in [_parse(name)] if kind is not None}
    return {
        name: kind
        for name, (kind, rest) in parsed.items()
        if not rest or any(other != kind and also == rest for other, also in parsed.values())
    }


def find_parts(names: Iterable[str]) -> dict[str, str]:
    """Find names that say a split of another one beside them, such as `cat_test` of `cat`."""
    parsed = {name: _parse(name) for name in names}
    wholes = {rest: name for name, (kind, rest) in parsed.items() if kind is None}
    return {name: wholes[rest] for name, (kind, rest) in parsed.items() if kind and rest in wholes}


def find_splits(names: Iterable[str], kind: str) -> list[str]:
    """Find the splits of a kind among a dataset's splits.

    The kind's own name is taken first, then names that say nothing else (`dev`), then any that say it
    (`validation_matched`).
    """
    names = list(names)
    if kind in names:
        return [kind]
    related = {name: rest for name in names for found, rest in [_parse(name)] if found == kind}
    return [name for name, rest in related.items() if not rest] or list(related)


def choose_split(names: Iterable[str], kind: str, parameter: str) -> str | None:
    """Choose the split of a kind; refuse several, of which `parameter` chooses one."""
    found = find_splits(names, kind)
    if len(found) > 1:
        raise InputError(
            f"Several splits could be the {kind} split: {', '.join(found)}. Choose one: `{parameter}={found[0]}`."
        )
    return found[0] if found else None


def find_split_column(columns: Collection[str], values_of: Callable[[str], Collection[str]]) -> str | None:
    """Find the column that says which split a row is in: "split", "is_valid", or one whose values all name splits.

    The last has train and another split, and is not called "label" or "labels", where these may be classes. A column
    that is called "usage", "subset" or the like may have other values too. `values_of` gives the different ones.
    """
    own = next((name for name in columns if name.casefold() == SPLIT_COLUMN), None)
    own = own or next((name for name in columns if kind_of(name) and _parse(name)[1] == {"is"}), None)
    if own:
        return own
    values = {name: values_of(name) for name in columns if name not in ("label", "labels")}
    whole = (name for name, found in values.items() if _are_splits(found))
    return next(whole, None) or next((name for name, found in values.items() if _hold_splits(name, found)), None)


def _are_splits(names: Collection[str]) -> bool:
    # Of many captions, the first is none.
    kinds = split_kinds(names) if all(map(kind_of, names)) else {}
    return len(kinds) == len(names) and TRAIN in kinds.values() and len(set(kinds.values())) > 1


def _hold_splits(column: str, names: Collection[str]) -> bool:
    if not _SPLIT_COLUMNS & set(re.split(r"[\W_]+", column.casefold())):
        return False
    kinds = {kind_of(name) for name in names}
    return TRAIN in kinds and bool(kinds & {VALIDATION, TEST})


def kind_of(name: str) -> str | None:
    """Tell which split a name speaks of, whatever else it says: "validation_matched" of validation."""
    return _parse(name)[0]
