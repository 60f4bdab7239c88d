"""Which installed fonts can write a text: matplotlib's own knows Latin, Greek and Cyrillic, and few other scripts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

OWN = "DejaVu Sans"

# It has a box for every character.
PLACEHOLDERS = "Last Resort"


def writable(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Find fonts that can write names in any script, and number those that no installed font can write.

    Font families, to be tried in this order, and the names, where "class 7" stands for the eighth if it cannot be
    written.
    """
    families = [OWN]
    missing = set("".join(names)) - _characters(font_manager.findfont(OWN))
    # In a stable order: fonts are listed as the disk has them.
    for font in sorted(font_manager.fontManager.ttflist, key=lambda font: (font.name, font.fname)) if missing else ():
        if font.style != "normal" or font.name in families or font.name.startswith(PLACEHOLDERS):
            continue
        found = missing & _characters(font.fname)
        if found:
            families.append(font.name)
            missing -= found
    return families, [f"class {i}" if missing & set(name) else name for i, name in enumerate(names)]


def shorten(name: str, longest: int = 24) -> str:
    """Write a name in one line of so many characters: its start and its end, which tells similar names apart."""
    name, half = " ".join(str(name).split()), longest // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half + 1 :]}"


@cache
def _characters(file: str) -> set[str]:
    try:
        return {chr(code) for code in FT2Font(file).get_charmap()}
    # Colour bitmaps and other fonts that FreeType does not open for matplotlib.
    except (OSError, RuntimeError):
        return set()
