"""Measure the host memory of a training and of the processes that it starts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from transformers import TrainerCallback

# What no file backs: pages of the disk's cache can be taken back.
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


class MemoryGauge(TrainerCallback):
    """Read the memory at the end of a training's last epoch, while the processes that decode still run."""

    gigabytes = 0.0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.gigabytes = host_gigabytes()


def host_gigabytes() -> float:
    """Add up this process and those that it started; memory that several share counts once. 0 where not on Linux."""
    this = psutil.Process()
    kilobytes = 0
    for process in (this, *this.children(recursive=True)):
        # It may have ended, or the system may not tell.
        with suppress(OSError):
            fields = map(str.split, Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:])
            kilobytes += sum(int(field[1]) for field in fields if field[0] in _COUNTED)
    return 1024 * kilobytes / 1e9
