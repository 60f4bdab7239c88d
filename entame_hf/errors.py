"""The one exception that means: what the user gave cannot be used."""


class InputError(ValueError):
    """Report input that cannot be used: the message says what was wrong, what is allowed and what to type.

    Scripts print its message as one line and end with exit code 2; everything else that is raised is a bug.
    """
