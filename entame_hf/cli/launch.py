"""Run a command so that every expected end is a message and an exit code."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..errors import InputError, RunError


def say_once(message: str) -> None:
    """Print a message to standard error: one process of a host does it for all that end with the same one.

    Args:
        message (`str`): what ends this process.
    """
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
    print(message, file=sys.stderr, flush=True)
    with suppress(RuntimeError):
        if store is not None:
            store.set(f"{key}/said", "")


def run_script(main: Callable[[list[str]], object]) -> None:
    """Run a script's main function, with what may be expected to end it said in a message and an exit code.

    Args:
        main (`Callable`): takes the command line's arguments. Exit codes are those of [`InputError`] and [`RunError`],
            and 130 where it was interrupted.
    """
    name = Path(sys.argv[0]).name
    try:
        main(sys.argv[1:])
    except InputError as error:
        say_once(f"{name}: error: {' '.join(str(error).split())}")
        sys.exit(2)
    except RunError as error:
        say_once(f"{name}: error: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nInterrupted. Go on from a saved checkpoint with --resume_from_checkpoint last.", file=sys.stderr)
        sys.exit(130)
    if dist.is_initialized():
        # Threads of gloo that still run when Python ends would abort the process.
        dist.destroy_process_group()
