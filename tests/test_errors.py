"""Names from outside reach a terminal escaped."""

import pytest

from entame_hf import InputError, RunError
from entame_hf.errors import printable


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("cat 猫.jpg", "cat 猫.jpg"),
        ("a\nb", r"a\nb"),
        ("\x1b[2J", r"\x1b[2J"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("\x9b31m", r"\x9b31m"),
        ("\udcff.jpg", r"\udcff.jpg"),
        ("a\u200bb", r"a\u200bb"),
    ],
    ids=["plain", "newline", "escape", "bidi", "c1", "surrogate", "invisible"],
)
def test_printable_escapes_what_a_terminal_acts_on(name, shown):
    assert printable(name) == shown


@pytest.mark.parametrize(("error", "between"), [(InputError, " "), (RunError, "\n")])
def test_errors_are_printable(error, between):
    message = str(error("cannot read \x1b]0;title\x07.jpg:\r\nbad\ttab"))
    assert message == r"cannot read \x1b]0;title\x07.jpg:" + between + r"bad\ttab"
