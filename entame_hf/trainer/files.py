"""Files that are written whole or not at all, and disks that are full."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from ..errors import RunError

# No space, no quota, or a file that is too large.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_whole(file: Path, text: str) -> None:
    """Write a text file, or leave what was there: beside it first, then in its place."""
    draft = file.with_name(f"{file.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def explained_full_disk(folder: Path) -> Iterator[None]:
    """Name the disk and what to do if it is full: the libraries name neither."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # In the order of the three: Python's, torch's and safetensors' ways of saying it.
        by_torch = "inline_container" in str(error)
        if not (getattr(error, "errno", None) in FULL or by_torch or "I/O error" in str(error)):
            raise
        free = shutil.disk_usage(next(path for path in folder.absolute().parents if path.exists())).free / 1e6
        reason = "torch.save could not finish" if by_torch else str(error).rstrip(".")
        raise RunError(
            f"{folder} could not be written: {reason}. {free:.0f} MB are free there. Earlier checkpoints are intact: "
            "make room, and resume with `resume_from_checkpoint=last` (True in Python)."
        ) from error
