"""Time a training on a folder of many files up to its first batch."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
import timm
from transformers import TrainerCallback

from entame_hf import EntameTrainer
from entame_hf.data import build_datasets, default_workers, load_splits, set_image_size
from entame_hf.patch import as_transformers, timm_processor

from .sample_images import draw_images
from .throughput import training_arguments


def first_batch(options: argparse.Namespace) -> dict[str, Any]:
    """Time a training on 50,000 files from `train()` to its first batch, and what comes before."""
    count, classes, distinct = 50_000, 100, 100
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        draw_images(Path(folder) / "drawn", distinct, 224)
        drawn = sorted((Path(folder) / "drawn").glob("*/*.jpg"))
        for i in range(count):
            target = Path(folder) / "images" / str(i % classes) / f"{i}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(drawn[i // classes % distinct])
        start = time.perf_counter()
        splits = load_splits(data_dir=str(Path(folder) / "images"))
        scanned = time.perf_counter()
        model = as_transformers(timm.create_model("resnet18", num_classes=classes))
        processor = set_image_size(timm_processor(model), 224)
        begin = time.perf_counter()
        data = build_datasets(splits, processor, seed=0).train
        built = time.perf_counter()
        clock = FirstStep()
        args = training_arguments(options, 1, dataloader_num_workers=default_workers())
        trainer = EntameTrainer(model, args, train_dataset=data, callbacks=[clock])
        called = time.perf_counter()
        trainer.train()
    return {
        "files": count,
        "batch": options.batch,
        "seconds_to_scan": scanned - start,
        "seconds_to_build_datasets": built - begin,
        "seconds_from_train_to_first_batch": clock.began - called,
    }


class FirstStep(TrainerCallback):
    """Note when the first step begins, which has its batch by then."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
