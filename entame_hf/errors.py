"""What stops a run: input that cannot be used, and what happens to good input."""

from __future__ import annotations


class InputError(ValueError):
    """Report input that cannot be used: the message says what was wrong, what is allowed and what to type.

    Scripts print its message as one line and end with exit code 2. What is neither this nor a [`RunError`] is a bug.
    """


class RunError(RuntimeError):
    """Report what stopped a run whose input was good: the message says what is safe, and how to go on from there.

    Scripts print its message and end with exit code 1.
    """
