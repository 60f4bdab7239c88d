"""Run what is left of a suite, beside other processes that do the same."""

from __future__ import annotations

import gc
import logging
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import accelerate
import timm
import torch
import transformers

from entame_hf import InputError

from .cell import run_cell
from .processes import Place
from .results import append_line, done
from .suite import Cell


def plan(cells: list[Cell], results: Path) -> str:
    """Say what there is to run, and how much of it is done."""
    finished = done(results)
    there = Counter((cell.model, cell.dataset, cell.method) for cell in cells if cell.identity in finished)
    asked = Counter((cell.model, cell.dataset, cell.method) for cell in cells)
    rows = [f"{' × '.join(labels)}: {there[labels]} of {count} done" for labels, count in asked.items()]
    return "\n".join(
        [*rows, f"{len(cells)} runs, of which {there.total()} are done and {len(cells) - there.total()} left."]
    )


def run_suite(name: str, cells: list[Cell], results: Path, place: Place) -> int:
    """Run this process's share of what is left.

    Args:
        name (`str`): the suite's.
        cells (`list[Cell]`): all runs, the same list in every process.
        results (`Path`): the file whose lines say what is done, and which lines are added to.
        place ([`Place`]): which process this is.

    Returns:
        `int`: the exit code: 1 where a run failed, which does not stop the others.

    Raises:
        InputError: the file cannot be written, or holds something else.
    """
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.open("a").close()
    except OSError as error:
        raise InputError(f"--results {results} cannot be written: {error.strerror}. Give another file.") from error
    transformers.utils.logging.set_verbosity_error()
    # What is said of a configuration when it starts would be said in each of its runs.
    logging.getLogger("entame_hf.start").setLevel(logging.ERROR)
    finished = set(place.agree(sorted(done(results))))
    # A model and a data set's images are read once, and cuDNN tries its kernels once for their sizes.
    left = [cell for cell in cells if cell.identity not in finished]
    own = place.share(left, lambda cell: (cell.model, cell.dataset))
    common = {"suite": name, **_provenance(place)}
    # Sizes stay the same over many runs: cuDNN may try its kernels instead of guessing which is fast.
    torch.backends.cudnn.benchmark = True
    # The garbage of one training is collected when the next begins: not through all that was imported, each time.
    gc.freeze()
    ran, failed, started = 0, 0, time.perf_counter()
    for cell in own:
        ran += 1
        try:
            line = run_cell(cell)
        # Whatever it is, it is this run's.
        except Exception as error:
            if not isinstance(error, InputError):
                traceback.print_exc()
            print(f"{cell}: failed: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        append_line(results, line | common)
        accuracy, seconds = line["evaluations"][-1][1], line["seconds"]
        print(f"{cell}: {accuracy:.1%} in {seconds:.1f} s ({ran} here, of {len(left)})", flush=True)
    total = place.total(runs=ran - failed, failed=failed)
    minutes = (time.perf_counter() - started) / 60
    if place.rank == 0:
        print(
            f"{total['runs']} runs in {minutes:.1f} minutes, {total['runs'] / minutes * 60:,.0f} an hour, processes: "
            f"{place.world}. {total['failed']} failed. Results: {results}"
        )
    return int(failed > 0)


def _provenance(place: Place) -> dict[str, Any]:
    """Tell where and with what this process runs."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    launcher = f"accelerate launch --multi_gpu --num_processes {place.world}" if place.world > 1 else "python"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "processes": place.world,
        "commit": described.stdout.strip() or None,
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, timm, accelerate)},
        "command": f"{launcher} {shlex.join(sys.argv)}",
    }
