"""Threads and processes that decode images."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from .batches import thread_pool

_task: Callable[[int], Any]


def cores() -> int:
    """Count the cores that this process may use, a fair share where several train on one machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def threads() -> ThreadPoolExecutor:
    """Give this process's threads: one a core."""
    return _threads(os.getpid())


# A process that was forked has none of its parent's threads.
@cache
def _threads(process: int) -> ThreadPoolExecutor:
    return thread_pool(cores(), "decode")


def start_workers(task: Callable[[int], Any], count: int) -> ProcessPoolExecutor | None:
    """Fork processes that run one task: Pillow and processors hold Python's lock for most of a small image's time.

    Args:
        task (`Callable`): from a row to what is pickled back; forked processes have it as it is now.
        count (`int`): the number of processes.

    Returns:
        `concurrent.futures.ProcessPoolExecutor` or `None`: for [`work`]; `None` where processes can't be forked.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return None
    pool = ProcessPoolExecutor(
        count, multiprocessing.get_context("fork"), initializer=_begin, initargs=(task, os.getpid())
    )
    collects = gc.isenabled()
    # A collection in a fork, before it begins, would end what the parent has thrown away: process groups, streams.
    gc.disable()
    try:
        # The first task starts all of them: now, in the caller's thread.
        pool.submit(int).result()
    finally:
        if collects:
            gc.enable()
    return pool


def work(row: int) -> Any:
    """Run the task of the worker that this is called in."""
    return _task(row)


def _begin(task: Callable[[int], Any], parent: int) -> None:
    global _task
    _task = task
    gc.freeze()
    gc.enable()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # Ctrl-C is the main process's business, and a forked process has none of torch's threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: one that was killed told nobody."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
