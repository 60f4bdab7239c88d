"""Time the informed start's pass over the images, beside the epochs after it."""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import torch
from transformers import PrinterCallback, TrainerCallback

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.data import build_datasets, default_workers, load_splits, set_image_size
from entame_hf.patch import timm_processor

from .sample_images import draw_images
from .throughput import model_of, training_arguments

EPOCHS = 2
WARM_UP_BATCHES = 8


class Spans(TrainerCallback):
    """Time whole epochs, with the device's queue empty at their ends."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = now()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(now() - self.start)


def now() -> float:
    """Return seconds: of the clock on a GPU, of this process on a CPU, which others may share."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def informed_pass(options: argparse.Namespace) -> dict[str, Any]:
    """Train on files that no cache holds: the pass and its fit, the same from the cache, and two epochs.

    The first round chooses kernels, on a few images, and does not count. Each round has a cache of its own.
    """
    results: dict[str, Any] = {"size": options.size, "batch": options.batch, "images": options.images}
    with tempfile.TemporaryDirectory() as folder:
        draw_images(Path(folder, "images"), options.images, options.size)
        splits = load_splits(data_dir=str(Path(folder, "images")), test_fraction=0.001)
        for name in options.models:
            rounds = []
            for number in range(options.repeats + 1):
                datasets.config.HF_DATASETS_CACHE = Path(folder, "caches", f"{name}_{number}")
                part = max(1, len(splits.train) // (WARM_UP_BATCHES * options.batch))
                few = splits.train.shard(part, 0, contiguous=False)
                rounds.append(_round(options, name, splits if number else replace(splits, train=few)))
            rounds = rounds[1:]
            ratios = {
                "pass_over_epoch": [reading / epochs[1] for reading, _, epochs in rounds],
                "cached_pass_over_epoch": [cached / epochs[1] for _, cached, epochs in rounds],
                "first_epoch_over_second": [epochs[0] / epochs[1] for _, _, epochs in rounds],
            }
            results[name] = {"epoch_seconds": median(epochs[1] for _, _, epochs in rounds)} | {
                key: {"median": median(values), "min": min(values), "max": max(values)}
                for key, values in ratios.items()
            }
    return results | {"rounds": options.repeats}


def _round(options: argparse.Namespace, name: str, splits: Any) -> tuple[float, float, list[float]]:
    torch.manual_seed(0)
    model = model_of(name, options.size)
    data = build_datasets(splits, set_image_size(timm_processor(model), options.size)).train
    steps = EPOCHS * (len(data) // options.batch)
    passes, spans = [], Spans()
    settings: dict[str, Any] = {"recipe": "recommended", "entame_method": "informed", "energy_logging_steps": 0}
    workers = default_workers()
    args = training_arguments(options, steps, EntameTrainingArguments, dataloader_num_workers=workers, **settings)
    trainer = EntameTrainer(model, args, train_dataset=data, callbacks=[spans])
    trainer.remove_callback(PrinterCallback)
    fit = trainer.head_fitter.fit

    def timed() -> None:
        for _ in range(2):
            start = now()
            fit()
            passes.append(now() - start)

    trainer.head_fitter.fit = timed  # type: ignore[method-assign]
    trainer.train()
    return passes[0], passes[1], spans.seconds
