"""Names and numbers in Markdown."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

# They change the order of the characters around them.
_BIDI_CONTROLS = re.compile("[\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def plain(text: Any) -> str:
    """Write any text in one line without characters that control a terminal or the order of the text."""
    line = _BIDI_CONTROLS.sub("", " ".join(str(text).split()))
    # Surrogates stand for bytes of a file name that are no UTF-8, and cannot be written.
    return "".join("�" if unicodedata.category(character) in ("Cc", "Cs") else character for character in line)


def escape(text: Any) -> str:
    """Write any text in one line so that Markdown and HTML show it as it is."""
    # An underscore within a word means nothing in Markdown.
    special = r"[\\`*\[\]<>&|~$#{}!@^\"]|(?<!\w)_|_(?!\w)"
    return re.sub(special, lambda found: f"&#{ord(found[0])};", plain(text))


def number(value: Any) -> str:
    """Write an integer in full, another number with four significant digits, and anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
