"""How a training scales over the GPUs of one host, and what feature statistics of the global batch cost there.

`scripts/benchmark.py scaling` starts this file in one process a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
from throughput import StepClock, draw_images, model_of, training_arguments

from entame_hf import EntameConfig, EntameTrainer
from entame_hf.data import Augmentation, ClassificationDataset, Preparation, load_splits, set_image_size
from entame_hf.data.workers import cores
from entame_hf.models import timm_processor

CONFIGURATIONS = Path(__file__).parent / "accelerate"
PASSED_ON = ("size", "batch", "epochs")


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    """Train with the same batch a process on 1, 2, 4... GPUs, through the project's own input.

    Every process reads as many images as the one on one GPU does. On all GPUs, runs with statistics of the global
    batch take turns with runs whose processes keep their own. Without a GPU, two processes share the CPU.
    """
    on_cpu = not torch.cuda.is_available()
    most = 2 if on_cpu else torch.cuda.device_count()
    counts = [count for count in (1, 2, 4, 8) if count <= most]
    results: dict[str, Any] = {"model": options.models[0], **{name: getattr(options, name) for name in PASSED_ON}}
    with tempfile.TemporaryDirectory() as folder:
        draw_images(Path(folder) / "images", options.images * counts[-1], options.size)
        for count in counts:
            last = count == counts[-1] and count > 1
            configuration = "cpu" if on_cpu else "ddp" if count > 1 else "single_gpu"
            command = [
                *(sys.executable, "-m", "accelerate.commands.launch"),
                *("--config_file", str(CONFIGURATIONS / f"{configuration}.yaml"), "--num_processes", str(count)),
                *(__file__, "--folder", folder, "--model", options.models[0]),
                *("--images", str(options.images * count), "--pairs", str(options.pairs if last else 0)),
                *(text for name in PASSED_ON for text in (f"--{name}", str(getattr(options, name)))),
            ]
            subprocess.run(command, check=True)
            rates = json.loads(Path(folder, "rates.json").read_text())
            results[f"images_per_second_{count}"] = rate = median(rates["global"])
            if count > 1:
                results[f"efficiency_{count}"] = rate / (count * results["images_per_second_1"])
            if last:
                pairs = zip(rates["own"], rates["global"], strict=True)
                results["step_with_global_over_own_statistics"] = [own / together for own, together in pairs]
            print(results, flush=True)
    return results


def worker(options: argparse.Namespace) -> None:
    datasets.config.HF_DATASETS_CACHE = options.folder
    rows: Any = load_splits(data_dir=str(options.folder / "images"), test_fraction=0.001).train
    rows = rows.select(range(min(len(rows), options.images)))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    rates: dict[str, list[float]] = {"global": [], "own": []}
    for kind in ("global", "own") * options.pairs or ("global",):
        torch.manual_seed(0)
        model = model_of(options.model, options.size)
        preparation = Preparation(set_image_size(timm_processor(model), options.size), exact=False)
        data = ClassificationDataset(rows, "image", "label", preparation, Augmentation("flip"))
        args = training_arguments(
            options, 1, dataloader_num_workers=max(1, cores() // processes), use_cpu=not torch.cuda.is_available()
        )
        epoch = len(data) // (options.batch * args.world_size)
        args.max_steps = last = epoch * options.epochs
        clock = StepClock(epoch, last)
        config = EntameConfig(sync=kind == "global")
        EntameTrainer(model, args, train_dataset=data, callbacks=[clock], entame=config).train()
        rates[kind].append(clock.rate(options.batch * args.world_size, epoch, last))
    if args.process_index == 0:
        Path(options.folder, "rates.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", required=True)
    for number in (*PASSED_ON, "images", "pairs"):
        parser.add_argument(f"--{number}", type=int, required=True)
    parsed = parser.parse_args()
    parsed.compile = False
    worker(parsed)
