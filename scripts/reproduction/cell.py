"""One run: a short training through `EntameTrainer`, and the line that remains of it."""

from __future__ import annotations

import math
import time
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction, PrinterCallback, TimmWrapperImageProcessor, set_seed

from entame_hf.data import ClassificationDataset, build_datasets, split_dataset
from entame_hf.heads import find_heads
from entame_hf.metrics import predicted_classes
from entame_hf.trainer import ENERGY_PREFIX as PREFIX
from entame_hf.trainer import EarlyEvaluation

from .datasets import load_data
from .models import load_model
from .peers import TRAINERS
from .results import Line
from .suite import Cell, run_arguments

EARLY_STEPS = 10


def run_cell(cell: Cell) -> Line:
    """Train and evaluate, as a cell says.

    Nothing but the cell decides the result: on a CPU, the same cell gives the same line again, whatever ran before.

    Args:
        cell ([`Cell`]): the run.

    Returns:
        `dict`: its result line, but for what a whole process has in common.
    """
    settings = cell.settings
    train, evaluation = _data(
        settings["dataset_source"],
        settings["image_size"],
        settings.get("image_flip", True),
        *(tuple(settings.get(f"image_{name}", ())) for name in ("mean", "std")),
    )
    started = time.perf_counter()
    args = run_arguments(
        settings,
        output_dir=_scratch().name,
        seed=cell.seed,
        bf16=torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        per_device_eval_batch_size=500,
    )
    # The images are read once for all runs; which are flipped depends on the seed.
    train.pipeline.augmentation.seed = cell.seed  # type: ignore[union-attr]
    set_seed(cell.seed)
    model = load_model(settings["model_source"], train.pipeline.num_classes)
    if args.zero_head:
        for head in find_heads(model):
            for parameter in head.module.parameters():
                nn.init.zeros_(parameter)
    if args.device.type == "cuda":
        # The layout of cuDNN's fast kernels; EntameTrainer chooses it on CPUs.
        model.to(memory_format=torch.channels_last)
    trainer = TRAINERS[args.schedule](
        model,
        args,
        train_dataset=train,
        eval_dataset=evaluation,
        compute_metrics=_accuracy,
        preprocess_logits_for_metrics=predicted_classes,
        callbacks=[EarlyEvaluation(EARLY_STEPS)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = trainer.state.log_history
    return {
        "model": cell.model,
        "dataset": cell.dataset,
        "method": cell.method,
        "seed": cell.seed,
        "settings": settings,
        "classes": train.pipeline.num_classes,
        "train_size": len(train),
        "test_size": len(evaluation),
        "steps_per_epoch": round(trainer.state.max_steps / args.num_train_epochs),
        "evaluations": sorted(
            {entry["step"]: entry["eval_accuracy"] for entry in log if "eval_accuracy" in entry}.items()
        ),
        "energies": _energies(log),
        # Where it was measured.
        **{name: entry[name] for entry in log for name in entry if name == "head_lr"},
        "seconds": round(time.perf_counter() - started, 3),
    }


@cache
def _data(
    source: str, size: int, flip: bool, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[ClassificationDataset, ClassificationDataset]:
    """Prepare a data set once for all runs: squashed to a square, normalised by its own colours or by those given."""
    loaded = load_data(source)
    splits = split_dataset(
        loaded, image_column_name="image", label_column_name="label", train_split="train", eval_split="test"
    )
    processor = TimmWrapperImageProcessor(
        {
            "input_size": (3, size, size),
            "interpolation": "bilinear",
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mean": mean or (0.0, 0.0, 0.0),
            "std": std or (1.0, 1.0, 1.0),
        }
    )
    built = build_datasets(splits, processor, augmentation="flip" if flip else "none", seed=0, own_statistics=not mean)
    return built.train, built.validation


@cache
def _scratch() -> TemporaryDirectory:
    """Make the folder that a trainer asks for; nothing is written into it."""
    return TemporaryDirectory()


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": round(float(np.mean(prediction.predictions == prediction.label_ids)), 6)}


def _energies(log: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Arrange what was measured of the error in columns, one value a step, of as many digits as figures show.

    What only the first step has is a column of one.
    """
    steps: dict[int, dict[str, float]] = {}
    for entry in log:
        measured = {
            key.removeprefix(PREFIX): float(f"{value:.4g}")
            for key, value in entry.items()
            if key.startswith(PREFIX) and math.isfinite(value)
        }
        if measured:
            steps.setdefault(entry["step"], {}).update(measured)
    names = dict.fromkeys(name for values in steps.values() for name in values)
    columns: dict[str, list[Any]] = {"step": list(steps)}
    for name in names:
        last = max(number for number, values in enumerate(steps.values()) if name in values)
        columns[name] = [values.get(name) for values in list(steps.values())[: last + 1]]
    return columns
