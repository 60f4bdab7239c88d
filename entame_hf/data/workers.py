"""Threads and processes that decode images."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

import torch

from .batches import thread_pool

logger = logging.getLogger(__name__)

# Rows that a process gets at a time.
_CHUNK = 8
_task: Callable[[int], Any]


def cores() -> int:
    """Count the cores that this process may use: its fraction of them if several ranks share the machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def threads() -> ThreadPoolExecutor:
    """Return this process's threads, one a core."""
    return _threads(os.getpid())


def in_threads(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    """Call a function for many values in threads, a few tasks a thread, and return the results in their order."""
    step = max(1, -(-len(values) // (4 * cores())))
    parts = [values[start : start + step] for start in range(0, len(values), step)]
    return [result for part in threads().map(lambda part: [*map(function, part)], parts) for result in part]


# A forked process has none of its parent's threads.
@cache
def _threads(process: int) -> ThreadPoolExecutor:
    return thread_pool(cores(), "decode")


class Workers:
    """Run a task for many rows, in forked processes once they are started, else in threads; results are pickled.

    Pillow and image processors hold Python's lock for most of the time that a small image takes. Processes have the
    task as it is when they start.
    """

    def __init__(self, task: Callable[[int], Any]):
        self.task = task
        self.pool: ProcessPoolExecutor | None = None

    def start(self, count: int) -> None:
        """Start processes, if none run and the system can fork."""
        if count and self.pool is None and "fork" in multiprocessing.get_all_start_methods():
            self.pool = _fork(self.task, count)

    def stop(self) -> None:
        """Stop the processes: the training process is slower beside processes that were forked from it."""
        if self.pool is not None:
            self.pool.shutdown(wait=False)
            self.pool = None

    def map(self, rows: list[int]) -> list[Any]:
        """Run the task for rows, and return the results in their order."""
        if self.pool is not None:
            try:
                return list(self.pool.map(_run, rows, chunksize=_CHUNK))
            except BrokenProcessPool:
                logger.warning("A worker that decodes images was killed; is memory short? Threads decode instead.")
                self.pool = None
        return in_threads(self.task, rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pool": None}


def _fork(task: Callable[[int], Any], count: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(task, os.getpid()))
    collects = gc.isenabled()
    # A collection in a fork, before it begins, would end what the parent no longer uses: process groups, streams.
    gc.disable()
    try:
        # The first task starts all of them: now, in the caller's thread.
        pool.submit(int).result()
    finally:
        if collects:
            gc.enable()
    return pool


def _run(row: int) -> Any:
    return _task(row)


def _begin(task: Callable[[int], Any], parent: int) -> None:
    global _task
    _task = task
    gc.freeze()
    gc.enable()
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    # The main process handles Ctrl-C, and a forked process has none of torch's threads.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _exit_with(parent: int) -> None:
    """End this process once its parent has ended: a parent that is killed tells nobody."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
