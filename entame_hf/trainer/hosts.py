"""Jobs on several hosts: what each host must have, and an end where one of them falls silent."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread

import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainingArguments
from transformers.utils import logging

from ..errors import InputError

logger = logging.get_logger(__name__)

# Seconds until a silent host is asked whether it is there, between two questions, and how many it may leave open.
IDLE, INTERVAL, PROBES = 10, 5, 6

GO_ON = "--resume_from_checkpoint last (resume_from_checkpoint=True in Python)"


def are_several() -> bool:
    """Tell whether this job's processes are on several hosts, as the launcher has it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return world > int(os.environ.get("LOCAL_WORLD_SIZE", world))


def same_on_all(find: Callable[[], str]) -> str:
    """Find a file or folder on every process, so that all of them go on or none does.

    Args:
        find (`Callable`): returns a path, which may differ between hosts in all but its name.

    Returns:
        `str`: what this process has found.

    Raises:
        InputError: on every process, where one of them has not found it, or another one.
    """
    found, reason = "", None
    try:
        found = find()
    except InputError as error:
        reason = str(error)
    # Alone, gathering gives back what it was given.
    # The folder that a process is in is known as "." there.
    answers = gather_object([(Path(found).absolute().name if reason is None else "", reason)])
    first = next((rank for rank, (name, _) in enumerate(answers) if name), None)
    if first is None:
        raise InputError(reason)
    expected = answers[first][0]
    for rank, (name, why) in enumerate(answers):
        if name != expected:
            raise InputError(
                f"Rank {first} would go on from {expected}, and rank {rank} from {name or f'nothing ({why})'}. All "
                "hosts must have the same: give one that they all have, or copy it to the output folder of each."
            )
    return found


def check_folder(args: TrainingArguments) -> None:
    """Make sure, before a training on several hosts, that what the first of them writes can be read where it must be.

    Args:
        args (`TrainingArguments`): `output_dir` is made; the options that say what is saved and loaded are read.

    Raises:
        InputError: on every process: files would be missing on other hosts in the middle of the run.
    """
    if not are_several():
        return
    if args.save_on_each_node:
        raise InputError(
            "save_on_each_node=True leaves checkpoints without weights on all hosts but the first one. Leave it out, "
            "and give an output_dir that all hosts see."
        )
    folder = Path(str(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    # A name that nobody has looked for: a network's file system may remember for a while that a file is missing.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as file:
        (name,) = broadcast_object_list([Path(file.name).name])
        shared = all(gather_object([(folder / name).exists()]))
    if shared:
        return
    if args.load_best_model_at_end:
        raise InputError(
            f"load_best_model_at_end=True needs the best checkpoint on every host, and the first one alone writes it, "
            f"to {folder}. Give an output_dir that all hosts see."
        )
    if args.save_strategy != "no" and args.process_index == 0:
        logger.warning(
            f"Other hosts do not see {folder}: this one alone keeps checkpoints, and a run that was cut off goes on "
            "from one that every host has. Give an output_dir that all hosts see, or copy the last checkpoint to each "
            f"of them before you go on with {GO_ON}."
        )


@cache
def watch() -> None:
    """End this process with a sentence where another host of the job loses power or its network.

    Nobody closes connections there: gloo would wait for ddp_timeout, and NCCL for its own. The first process of each
    host keeps a connection to the job's first process, over which nothing is sent. The kernels keep it alive, so that
    a host is there however long its processes compile, save or push; and they close it when a process ends in
    whatever way, which is for the launcher and the libraries to judge.
    """
    if not are_several() or sys.platform != "linux":
        return
    server = None
    if dist.get_rank() == 0:
        both = socket.has_dualstack_ipv6()
        server = socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    (port,) = broadcast_object_list([server and server.getsockname()[1]])
    if server is not None:
        Thread(target=_receive, args=(server,), daemon=True).start()
    elif int(os.environ["LOCAL_RANK"]) == 0:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=IDLE)
        except OSError as error:
            logger.warning(
                f"Rank {dist.get_rank()} cannot watch whether the job's first host stays alive ({error}): where one "
                f"of them loses power, the other may wait. Open {os.environ['MASTER_ADDR']}:{port} to its hosts."
            )
            return
        connection.sendall(dist.get_rank().to_bytes(4))
        Thread(target=_await_end, args=(connection, 0), daemon=True).start()


def _receive(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        Thread(target=_meet, args=(connection,), daemon=True).start()


def _meet(connection: socket.socket) -> None:
    # Whoever else knocks, such as a scan of ports, says something else or nothing.
    greeting = b""
    with suppress(OSError):
        greeting = connection.recv(4)
    if len(greeting) == 4 and int.from_bytes(greeting) < dist.get_world_size():
        _await_end(connection, int.from_bytes(greeting))


def _await_end(connection: socket.socket, rank: int) -> None:
    """Wait for the end of the process at the other side, and end this one where the host is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, IDLE),
        (socket.TCP_KEEPINTVL, INTERVAL),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    try:
        connection.recv(1)
    # It does not answer, or has started anew and knows of no connection.
    except OSError as error:
        print(
            f"The host of rank {rank} does not answer ({error.strerror}): it has lost power or its network, and the "
            f"job ends. Nothing but the steps since the last checkpoint is lost: go on with {GO_ON}, on any number of "
            "hosts that have it.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
