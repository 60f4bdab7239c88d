"""Run a command so that every expected end is a message and an exit code."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from tqdm.auto import tqdm
from transformers.utils import logging as transformers_logging

from ..errors import InputError, RunError
from .console import fitted, say


def say_once(message: str) -> None:
    """Print a message to standard error: one process of a host does it for all that end with the same one."""
    where = {name: os.environ.get(name, "") for name in ("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")}
    key = f"entame_hf/{'/'.join(where.values())}/{hashlib.sha256(message.encode()).hexdigest()}"
    store = None
    # The launcher's, as it is there before any process group and after a process has failed.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with suppress(RuntimeError):
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=10))
            if store.add(key, 1) > 1:
                # The launcher ends all processes as soon as one has ended.
                store.wait([f"{key}/said"])
                return
    tqdm.write(message, file=sys.stderr)
    with suppress(RuntimeError):
        if store is not None:
            store.set(f"{key}/said", "")


def run_command(main: Callable[[list[str]], object], argv: list[str], name: str) -> None:
    """Run a command; an early end is a message and an exit code: 2 for bad input, 1 for a run, 130 for Ctrl-C."""
    try:
        main(argv)
    except InputError as error:
        say_once(fitted(f"{name}: error: {' '.join(str(error).split())}", sys.stderr))
        sys.exit(2)
    except RunError as error:
        say_once(f"{name}: error: {error}")
        sys.exit(1)
    except KeyboardInterrupt as stop:
        say_once(f"{name}: interrupted. {stop}".rstrip())
        sys.exit(130)
    if dist.is_initialized():
        # Threads of gloo that still run when Python ends would abort the process.
        dist.destroy_process_group()


class _Handler(logging.Handler):
    """Print what the package warns of, above a progress bar where there is one."""

    def __init__(self, named: Callable[[str], str]) -> None:
        super().__init__()
        self._named = named

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {self._named(record.getMessage())}", sys.stderr)


@contextmanager
def options_named(named: Callable[[str], str], level: int = logging.WARNING) -> Iterator[None]:
    """Write the options that errors and warnings name in backticks as they are typed."""
    # What helps nobody: bars under the bar, and remarks about defaults.
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    logger, handler = logging.getLogger(__name__.partition(".")[0]), _Handler(named)
    handler.setLevel(level)
    logger.addHandler(handler)
    try:
        yield
    except (InputError, RunError) as error:
        error.args = (named(str(error)),)
        raise
    finally:
        logger.removeHandler(handler)
