"""Find class names that look alike, or that look like a missing label."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable
from textwrap import shorten

from ..errors import printable
from .splits import normal

# Letters of other scripts that are drawn as Latin ones.
_DRAWN_ALIKE = str.maketrans(
    "АВЕКМНОРСТХУавекмнорстхуіјѕԁΑΒΕΖΗΙΚΜΝΟΡΤΥΧο", "ABEKMHOPCTXYabekmhopctxyijsdABEZHIKMNOPTYXo"
)

# What separates several labels in one text.
_JOINTS = re.compile(r"\s*[,;|/+&]\s*|\s+")

_MISSING = frozenset(("", "-1", "nan", "na", "n/a", "none", "null", "nil", "?", "-", "#n/a", "<na>"))


def skeleton(name: str) -> str:
    """Give what a reader sees of a name: names of one skeleton can't be told apart on a screen."""
    text = unicodedata.normalize("NFKC", name).translate(_DRAWN_ALIKE)
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc", "Cs"))
    return " ".join(text.split())


def _loose(name: str) -> str:
    """Give a name without case, separators, leading zeros and decimals that are zeros."""
    text = skeleton(name).casefold()
    # The numbers of a table may have become decimals: 1.0.
    text = text.partition(".")[0] if re.fullmatch(r"-?\d+\.0+", text) else text
    words = "".join(c if c.isalnum() else " " for c in text).split()
    return " ".join(word.lstrip("0") or "0" if word.isdigit() else word for word in words) or text


def code_points(name: str) -> str:
    """Write a name with its code points: 'cat ' (U+0063 U+0061 U+0074 U+0020)."""
    points = " ".join(f"U+{ord(character):04X}" for character in name)
    return f"{printable(name)!r} ({shorten(points, 120, placeholder=' ...') or 'empty'})"


def same_looks(names: Iterable[str]) -> list[list[str]]:
    """Group names that differ in spaces, invisible characters or letters drawn alike only."""
    return _groups(names, skeleton)


def similar_looks(names: Iterable[str]) -> list[list[str]]:
    """Group names that differ in case, separators or leading zeros only."""
    return [group for group in _groups(names, _loose) if len({skeleton(name) for name in group}) > 1]


def _groups(names: Iterable[str], key: object) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[key(name)].append(name)  # type: ignore[operator]
    return [group for group in groups.values() if len(group) > 1]


def joined(names: Collection[str]) -> list[str]:
    """Find the names that join others: "cat, dog" beside "cat" and "dog"."""
    # As a list is written: ['cat', 'dog'].
    bare = {name: name.strip("[](){} \"'") for name in names}
    parts = {name: [part.strip(" \"'") for part in _JOINTS.split(text)] for name, text in bare.items()}
    return [name for name, found in parts.items() if len(found) > 1 and set(found) <= set(bare.values())]


def seems_missing(name: str) -> bool:
    """Tell whether a class name may stand for a missing label: empty, "nan", "None"."""
    return skeleton(name).casefold() in _MISSING


def hint(name: str, known: Iterable[str]) -> str:
    """Say which known name an unknown one looks like; empty where none is near."""
    near = [other for other in known if _loose(other) == _loose(name) and normal(other) != normal(name)]
    return f" {code_points(name)} looks like {code_points(near[0])}." if near else ""
