"""What stops a run, and how names from outside are printed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from textwrap import shorten


def printable(name: object) -> str:
    """Escape characters from outside that a terminal or a page would not show as they are, such as newlines."""
    text = str(name)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def unknown_value(what: str, value: object, allowed: Iterable[str]) -> str:
    """Write the message for a value that is none of those allowed, with the one that was probably meant."""
    allowed, text = list(allowed), str(value).lower()
    close = [word for word in allowed if text and word.startswith(text)] or get_close_matches(text, allowed, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"{what} {value!r} is unknown.{hint} Use one of {shorten(', '.join(allowed), 300, placeholder=' and others')}."
    )


class InputError(ValueError):
    """Report input that cannot be used: the message says what is wrong, what is allowed and what to type.

    The message is one line; characters that are not printable are escaped. Scripts print it and end with exit code 2.
    What is neither this nor a [`RunError`] is a bug.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(" ".join(str(message).splitlines())))


class RunError(RuntimeError):
    """Report what stopped a run whose input was good: the message says what is safe, and how to resume.

    Characters of the message that are not printable are escaped, line by line. Scripts print it and end with exit code
    1.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__("\n".join(map(printable, str(message).splitlines())))


class NonFiniteError(RunError):
    """Report a training whose loss or weights are not finite any more: nothing of them was saved."""
