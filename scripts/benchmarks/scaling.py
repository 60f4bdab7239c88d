"""Time a training on several GPUs of one host, and the cost of feature statistics over the global batch.

`scripts/benchmark.py scaling` starts this module in one process a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
from transformers import PrinterCallback, TrainerCallback

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.data import Augmentation, ClassificationDataset, Preparation, load_splits, set_image_size
from entame_hf.data.workers import default_workers
from entame_hf.patch import normalised_heads, timm_processor

from .sample_images import draw_images
from .throughput import model_of, training_arguments
from .timers import BlockTimer, EpochTurns

SCRIPTS = Path(__file__).parents[1]
PASSED_ON = ("size", "batch", "repeats")
# The first epoch decodes the images; from the second on, epochs are alike.
WARM_UP_EPOCHS = 2
# Steps of a block, and steps before the first block: the first 20 measure energies.
BLOCK, WARM_UP = 10, 30


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Train with the same batch a process on 1, 2, 4... GPUs, from files.

    A training on one GPU and one on several take turns, epoch by epoch, as machines change their pace. Every process
    reads as many images as the training on one GPU. An epoch includes the wait for its first batch. On all GPUs, one
    more training has blocks of steps with feature statistics of the global batch and of each process's own batch, in
    turn. Without a GPU, two processes share the CPU.
    """
    most = torch.cuda.device_count() if torch.cuda.is_available() else 2
    counts = [count for count in (2, 4, 8) if count <= most]
    if not counts:
        raise SystemExit("scaling compares one GPU with several, and this host has one.")
    results: dict[str, Any] = {"model": options.models[0], **{name: getattr(options, name) for name in PASSED_ON}}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        # A few more than are trained on, for the validation split.
        draw_images(Path(folder) / "images", int(1.002 * options.images * counts[-1]) + 20, options.size)
        print(f"drew the images in {time.perf_counter() - start:.0f} s", flush=True)
        for count in counts:
            blocks = 2 * options.repeats if count == counts[-1] else 0
            train_by_turns(options, folder, {1: 0, count: blocks})
            one, several = (json.loads(Path(folder, f"{n}.json").read_text()) for n in (1, count))
            results |= _compare_counts(count, one, several)
            if blocks:
                results |= _compare_statistics(**several["milliseconds"])
            print(results, flush=True)
    return results


def train_by_turns(options: argparse.Namespace, folder: str, blocks: dict[int, int]) -> None:
    """Start a training for each number of processes; if one fails, end all.

    Args:
        options (`argparse.Namespace`): The benchmark's options.
        folder (`str`): The folder of the images, of the file that says whose turn it is, and of the measurements.
        blocks (`dict[int, int]`): Blocks of steps to time after the epochs, by number of processes, in order of turns.

    Raises:
        RuntimeError: A training failed.
    """
    Path(folder, "turn").unlink(missing_ok=True)
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    trainings = []
    for place, (count, number) in enumerate(blocks.items()):
        several = "ddp" if torch.cuda.is_available() else "cpu"
        configuration = str(SCRIPTS / "launch" / f"{several if count > 1 else 'single_gpu'}.yaml")
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", configuration, "--num_processes", str(count), "--main_process_port", "0"),
            *("--module", "benchmarks.scaling", "--folder", folder, "--model", options.models[0]),
            *("--images", str(options.images * count), "--place", str(place), "--blocks", str(number)),
            *(text for name in PASSED_ON for text in (f"--{name}", str(getattr(options, name)))),
        ]
        trainings.append(subprocess.Popen(command, env=environment, start_new_session=True))
    try:
        while any(training.poll() != 0 for training in trainings):
            if any(training.returncode for training in trainings):
                raise RuntimeError("A training failed: its message is above.")
            time.sleep(0.1)
    finally:
        for training in trainings:
            with suppress(ProcessLookupError):
                os.killpg(training.pid, signal.SIGTERM)


def _compare_counts(count: int, one: dict[str, Any], several: dict[str, Any]) -> dict[str, Any]:
    """Compare each epoch on several GPUs with the epoch on one GPU before it, which has as many steps."""
    ratios = [alone / together for alone, together in zip(one["seconds"], several["seconds"], strict=True)]
    return {
        f"images_per_second_1_beside_{count}": one["images"] / median(one["seconds"]),
        f"images_per_second_{count}": several["images"] / median(several["seconds"]),
        f"efficiency_{count}_median": median(ratios),
        f"efficiency_{count}_min": min(ratios),
        f"efficiency_{count}_max": max(ratios),
    }


def _compare_statistics(own: list[float], together: list[float]) -> dict[str, Any]:
    """Compare each block with the mean of the blocks around it."""
    around = [(before + after) / 2 for before, after in pairwise(own)]
    ratios = [block / other for block, other in zip(together, around, strict=False)]
    return {
        "milliseconds_per_step": median(own),
        "ratio_of_global_statistics_median": median(ratios),
        "ratio_of_global_statistics_min": min(ratios),
        "ratio_of_global_statistics_max": max(ratios),
        "rounds": len(ratios),
    }


def worker(options: argparse.Namespace) -> None:
    """Train in this process, beside the others of its launch; the first process writes what it measured."""
    datasets.config.HF_DATASETS_CACHE = options.folder
    rows: Any = load_splits(data_dir=str(options.folder / "images"), test_fraction=0.001).train
    rows = rows.select(range(options.images))
    preparation = Preparation(
        set_image_size(timm_processor(model_of(options.model, options.size)), options.size), exact=False
    )
    data = ClassificationDataset(rows, "image", "label", preparation, Augmentation("flip"))
    on_cpu = not torch.cuda.is_available()
    args = training_arguments(
        options, 1, EntameTrainingArguments, dataloader_num_workers=default_workers(), use_cpu=on_cpu
    )
    epoch = len(data) // (options.batch * args.world_size)
    args.max_steps = epoch * (WARM_UP_EPOCHS + options.repeats)
    turns = EpochTurns(options.folder / "turn", options.place, 2, WARM_UP_EPOCHS)
    trainer_of(options, args, data, turns).train()
    measured: dict[str, Any] = {"images": epoch * options.batch * args.world_size, "seconds": turns.seconds}
    if options.blocks:
        # One more block, so that the last one has one after it.
        args.max_steps = WARM_UP + BLOCK * (options.blocks + 1) + 1
        trainer = trainer_of(options, args, data)
        settings = {"own": partial(synchronise, trainer, False), "together": partial(synchronise, trainer, True)}
        timer = BlockTimer(BLOCK, WARM_UP, settings)
        trainer.add_callback(timer)
        trainer.train()
        measured["milliseconds"] = timer.milliseconds()
    if args.process_index == 0:
        Path(options.folder, f"{args.world_size}.json").write_text(json.dumps(measured))


def trainer_of(options: argparse.Namespace, args: Any, data: Any, *callbacks: TrainerCallback) -> EntameTrainer:
    torch.manual_seed(0)
    model = model_of(options.model, options.size)
    trainer = EntameTrainer(model, args, train_dataset=data, callbacks=list(callbacks))
    # The log is not the result here.
    trainer.remove_callback(PrinterCallback)
    return trainer


def synchronise(trainer: EntameTrainer, sync: bool) -> None:
    """Set whether feature statistics are those of the global batch."""
    for _, leaf in normalised_heads(trainer.model):
        leaf.znorm.sync = sync


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    for number in (*PASSED_ON, "images", "place", "blocks"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parsed = parser.parse_args()
    parsed.compile = False
    worker(parsed)
