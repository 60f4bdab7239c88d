"""Files that are written whole or not at all, and disks that are full."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from .errors import RunError

# What room does not help against: a name, or who may write.
_NO_PLACE = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS}


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    write_file(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all: beside its place, and renamed.

    Raises:
        RunError: the disk is full, or the folder is gone or read-only.
    """
    draft = path.with_name(f".{path.name}.draft")
    with explained_write_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(draft)
            draft.replace(path)
        except OSError:
            # The name may be too long for it too.
            with suppress(OSError):
                draft.unlink()
            raise


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """Yield a folder whose files replace those of `folder` once all of them are written."""
    draft = folder / ".draft"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        for file in [path for path in draft.rglob("*") if path.is_file()]:
            place = folder / file.relative_to(draft)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def explained_write_errors(path: Path) -> Iterator[None]:
    """Name a file or folder, and what to do, if it cannot be written: the libraries name neither."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # In the order of the three: Python's, torch's and safetensors' ways of saying it.
        by_torch = "inline_container" in str(error)
        if not (getattr(error, "errno", None) or by_torch or "I/O error" in str(error)):
            raise
        free = shutil.disk_usage(next(place for place in path.absolute().parents if place.exists())).free / 1e6
        reason = "torch.save could not finish" if by_torch else getattr(error, "strerror", None) or error
        remedy = "Give a place that can" if getattr(error, "errno", None) in _NO_PLACE else "Make room"
        raise RunError(
            f"{path} could not be written ({reason}); {free:.0f} MB are free there. {remedy}, and type the command "
            "again. Earlier checkpoints are intact: `resume_from_checkpoint=last` (True in Python) resumes a training."
        ) from error
