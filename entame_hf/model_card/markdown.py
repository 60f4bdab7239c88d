"""Texts and numbers as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def escape(text: Any) -> str:
    """Write any text so that Markdown and HTML show it as it is, in one line.

    Args:
        text: a name, in any script, with any characters.

    Example:

    ```python
    >>> from entame_hf.model_card.markdown import escape

    >>> escape("a|b\\n<i>")
    'a&#124;b &#60;i&#62;'
    ```
    """
    # An underscore within a word means nothing in Markdown.
    return re.sub(
        r"[\\`*\[\]<>&|~$#{}!@^\"]|(?<!\w)_|_(?!\w)", lambda found: f"&#{ord(found[0])};", " ".join(str(text).split())
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table in Markdown; cells are written as they are given."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def number(value: float) -> str:
    """Write a number with four digits that count; integers whole."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
