"""How a training scales over the GPUs of one host, and what feature statistics of the global batch cost there.

`scripts/benchmark.py scaling` starts this module in one process a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
from transformers import TrainerCallback

from entame_hf import EntameTrainer
from entame_hf.data import Augmentation, ClassificationDataset, Preparation, load_splits, set_image_size
from entame_hf.data.workers import cores
from entame_hf.fold import normalised_heads
from entame_hf.models import timm_processor

from .drawing import draw_images
from .throughput import model_of, training_arguments
from .timers import BlockTimer, StepClock

SCRIPTS = Path(__file__).parents[1]
PASSED_ON = ("size", "batch", "epochs")
# Steps that are timed as one, and steps before the first of them: the error's energies are measured in the first 20.
BLOCK, WARM_UP = 5, 25


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Train with the same batch a process on 1, 2, 4... GPUs, through the project's own input.

    Every process reads as many images as the one on one GPU does. On all GPUs, blocks of steps of one more training
    take turns: with statistics of the global batch, and with those that each process takes of its own part. Without a
    GPU, two processes share the CPU.
    """
    on_cpu = not torch.cuda.is_available()
    most = 2 if on_cpu else torch.cuda.device_count()
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    results: dict[str, Any] = {"model": options.models[0], **{name: getattr(options, name) for name in PASSED_ON}}
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        draw_images(Path(folder) / "images", options.images * counts[-1], options.size)
        for count in counts:
            last = count == counts[-1] and count > 1
            name = "cpu" if on_cpu else "ddp" if count > 1 else "single_gpu"
            configuration = str(SCRIPTS / "accelerate" / f"{name}.yaml")
            command = [
                *(sys.executable, "-m", "accelerate.commands.launch"),
                *("--config_file", configuration, "--num_processes", str(count)),
                *("--module", "benchmarks.scaling", "--folder", folder, "--model", options.models[0]),
                *("--images", str(options.images * count), "--blocks", str(2 * options.repeats if last else 0)),
                *(text for name in PASSED_ON for text in (f"--{name}", str(getattr(options, name)))),
            ]
            subprocess.run(command, check=True, env=environment)
            measured = json.loads(Path(folder, "measured.json").read_text())
            results[f"images_per_second_{count}"] = measured["rate"]
            if count > 1:
                results[f"efficiency_{count}"] = measured["rate"] / (count * results["images_per_second_1"])
            if last:
                results |= _compare(**measured["milliseconds"])
            print(results, flush=True)
    return results


def _compare(own: list[float], together: list[float]) -> dict[str, Any]:
    """Compare each block with the mean of those around it, as the machine's pace changes."""
    around = [(before + after) / 2 for before, after in pairwise(own)]
    ratios = [time / other for time, other in zip(together, around, strict=False)]
    return {
        "milliseconds_per_step": median(own),
        "ratio_of_global_statistics_median": median(ratios),
        "ratio_of_global_statistics_min": min(ratios),
        "ratio_of_global_statistics_max": max(ratios),
        "rounds": len(ratios),
    }


def worker(options: argparse.Namespace) -> None:
    """Train in this process, beside the others of its launch; the first one writes down what it measured."""
    datasets.config.HF_DATASETS_CACHE = options.folder
    rows: Any = load_splits(data_dir=str(options.folder / "images"), test_fraction=0.001).train
    rows = rows.select(range(min(len(rows), options.images)))
    preparation = Preparation(
        set_image_size(timm_processor(model_of(options.model, options.size)), options.size), exact=False
    )
    data = ClassificationDataset(rows, "image", "label", preparation, Augmentation("flip"))
    args = training_arguments(options, 1, dataloader_num_workers=cores(), use_cpu=not torch.cuda.is_available())
    epoch = len(data) // (options.batch * args.world_size)
    args.max_steps = epoch * options.epochs
    clock = StepClock(epoch, args.max_steps)
    trainer_of(options, args, data, clock).train()
    measured: dict[str, Any] = {"rate": clock.rate(options.batch * args.world_size, epoch, args.max_steps)}
    if options.blocks:
        # The last has none after it that it could be compared with: there is one more.
        args.max_steps = WARM_UP + BLOCK * (options.blocks + 1) + 1
        trainer = trainer_of(options, args, data)
        settings = {"own": partial(synchronise, trainer, False), "together": partial(synchronise, trainer, True)}
        timer = BlockTimer(BLOCK, WARM_UP, settings)
        trainer.add_callback(timer)
        trainer.train()
        measured["milliseconds"] = timer.milliseconds()
    if args.process_index == 0:
        Path(options.folder, "measured.json").write_text(json.dumps(measured))


def trainer_of(options: argparse.Namespace, args: Any, data: Any, *callbacks: TrainerCallback) -> EntameTrainer:
    torch.manual_seed(0)
    model = model_of(options.model, options.size)
    return EntameTrainer(model, args, train_dataset=data, callbacks=list(callbacks))


def synchronise(trainer: EntameTrainer, sync: bool) -> None:
    """Say whether feature statistics are those of the global batch from now on."""
    for _, leaf in normalised_heads(trainer.model):
        leaf.znorm.sync = sync


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    for number in (*PASSED_ON, "images", "blocks"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parsed = parser.parse_args()
    parsed.compile = False
    worker(parsed)
