"""Train what a suite asks for: one short training through `EntameTrainer` a run, one result row each."""

from __future__ import annotations

import gc
import logging
import math
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import accelerate
import numpy as np
import timm
import torch
import transformers
from torch import nn
from transformers import BaseImageProcessor, EvalPrediction, PrinterCallback, TimmWrapperImageProcessor, set_seed

from entame_hf import InputError, NonFiniteError, find_heads
from entame_hf.data import ClassificationDataset, build_datasets, split_dataset
from entame_hf.metrics import predicted_classes
from entame_hf.trainer import ENERGY_PREFIX, EarlyEvaluation

from .corruptions import Pixels, corrupted
from .fastai import FastaiFineTune, put_head
from .groups import EARLY_STEPS
from .peers import BitSchedule, DecayingHead, ProbeThenFineTune, RunTrainer
from .processes import Place
from .rows import ENERGIES, Row, append_row, compact, read_rows, work_file
from .sources import load_data, load_model
from .suite import Experiment, run_arguments

TRAINERS: dict[str | None, type[RunTrainer]] = {
    None: RunTrainer,
    "lp_ft": ProbeThenFineTune,
    "fastai": FastaiFineTune,
    "head_decay": DecayingHead,
    "bit": BitSchedule,
}


def plan(experiments: list[Experiment], results: Path) -> str:
    """Say which runs there are, and how many of them are done."""
    finished = read_rows(results)
    done = Counter((e.model, e.dataset, e.method) for e in experiments if e.identity in finished)
    asked = Counter((e.model, e.dataset, e.method) for e in experiments)
    rows = [f"{' × '.join(labels)}: {done[labels]} of {count} done" for labels, count in asked.items()]
    left = len(experiments) - done.total()
    return "\n".join([*rows, f"{len(experiments)} runs: {done.total()} done, {left} left."])


def run_suite(name: str, experiments: list[Experiment], results: Path, place: Place) -> int:
    """Run this process's part of the runs that have no row in `results`; return 1 if one of them failed, else 0."""
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        work_file(results).open("a").close()
    except OSError as error:
        raise InputError(f"--results {results} cannot be written: {error.strerror}. Give another file.") from error
    transformers.utils.logging.set_verbosity_error()
    # Every run would repeat what is said of its configuration.
    logging.getLogger("entame_hf").setLevel(logging.ERROR)
    finished = set(place.agree(list(read_rows(results))))
    left = [experiment for experiment in experiments if experiment.identity not in finished]
    common = {"suite": name, **_provenance(place)}
    # Sizes stay the same over many runs, so cuDNN may time its kernels.
    torch.backends.cudnn.benchmark = True
    # Each run collects garbage: leave out what the imports allocated.
    gc.freeze()
    ran, failed, started = 0, 0, time.perf_counter()
    # A process reads a model and a dataset once, so runs of one combination stay together.
    for experiment in place.share(left, lambda each: (each.model, each.dataset)):
        ran += 1
        try:
            row = run_experiment(experiment)
        # A failed run must not end the others.
        except Exception as error:
            if not isinstance(error, InputError):
                traceback.print_exc()
            print(f"{experiment}: failed: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        append_row(results, row | common)
        accuracy, seconds = row["eval_accuracy"][-1], row["seconds"]
        print(f"{experiment}: {accuracy:.1%} in {seconds:.1f} s ({ran} here, of {len(left)})", flush=True)
    total = place.total(runs=ran - failed, failed=failed)
    minutes = (time.perf_counter() - started) / 60
    if place.rank == 0:
        compact(results)
        print(
            f"{total['runs']} runs in {minutes:.1f} minutes, {total['runs'] / minutes * 60:,.0f} an hour, processes: "
            f"{place.world}. {total['failed']} failed. Results: {results}"
        )
    return int(failed > 0)


def run_experiment(experiment: Experiment) -> Row:
    """Train and evaluate once; return the result row, without what all rows of a process share.

    On a CPU, the same experiment gives the same row, whatever ran before.
    """
    settings = experiment.settings
    colours = (tuple(settings.get(f"image_{name}", ())) for name in ("mean", "std"))
    images = (settings["dataset_source"], settings["image_size"], settings.get("image_flip", True), *colours)
    train, test, processor = _data(*images)
    started = time.perf_counter()
    args = run_arguments(
        settings,
        output_dir=_scratch().name,
        seed=experiment.seed,
        bf16=torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        per_device_eval_batch_size=500,
    )
    args.num_train_epochs -= args.pass_epochs
    # All runs share the images; the seed decides which are flipped.
    train.pipeline.augmentation.seed = experiment.seed  # type: ignore[union-attr]
    set_seed(experiment.seed)
    model = load_model(settings["model_source"], train.pipeline.num_classes)
    if args.zero_head:
        for head in find_heads(model):
            for parameter in head.module.parameters():
                nn.init.zeros_(parameter)
    config = put_head(model, train.pipeline.num_classes) if args.fastai_head else None
    if args.device.type == "cuda":
        # The layout of cuDNN's fast kernels; EntameTrainer chooses it on CPUs.
        model.to(memory_format=torch.channels_last)
    trainer = TRAINERS[args.schedule](
        model,
        args,
        train_dataset=train,
        eval_dataset=test,
        compute_metrics=_accuracy,
        preprocess_logits_for_metrics=predicted_classes,
        callbacks=[EarlyEvaluation(EARLY_STEPS)],
        entame=config,
        source=(settings["model_source"], images),
    )
    trainer.remove_callback(PrinterCallback)
    guessed: float | None = None
    try:
        trainer.train()
    # A run without a row would spare its method the failure.
    except NonFiniteError:
        guessed = 1 / train.pipeline.num_classes
    log, last = trainer.state.log_history, trainer.state.max_steps
    found = {entry["step"]: entry["eval_accuracy"] for entry in log if "eval_accuracy" in entry}
    if guessed is not None:
        found = dict.fromkeys((*range(1, 1 + min(EARLY_STEPS, last)), last), guessed) | found
    evaluations = sorted(found.items())
    sets = _corrupted(*images) if args.corruptions else []
    damaged = [(kind, guessed or trainer.evaluate(rows)["eval_accuracy"]) for kind, rows in sets]
    return {
        **vars(experiment),
        "classes": train.pipeline.num_classes,
        "train_size": len(train),
        "test_size": len(test),
        "steps_per_epoch": round(trainer.state.max_steps / args.num_train_epochs),
        "eval_step": [step for step, _ in evaluations],
        "eval_accuracy": [accuracy for _, accuracy in evaluations],
        **_energies(log),
        **{name: entry[name] for entry in log for name in entry if name in ("head_lr", "probe_accuracy", "logme")},
        "corruption": [kind for kind, _ in damaged],
        "corruption_accuracy": [accuracy for _, accuracy in damaged],
        "seconds": round(time.perf_counter() - started, 3),
    }


@cache
def _data(
    source: str, size: int, flip: bool, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[ClassificationDataset, ClassificationDataset, BaseImageProcessor]:
    """Build the datasets once for all runs: resized to a square, normalised by their own colours or by those given."""
    splits = split_dataset(
        load_data(source), image_column_name="image", label_column_name="label", train_split="train", eval_split="test"
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
    return built.train, built.validation, built.processor


# Processes train on few datasets in turn, and these take memory.
@lru_cache(1)
def _corrupted(*images: Any) -> list[tuple[str, Pixels]]:
    _, test, processor = _data(*images)
    return corrupted(test, processor)


@cache
def _scratch() -> TemporaryDirectory:
    """Make the output folder that a trainer needs; nothing is written to it."""
    return TemporaryDirectory()


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    # Beside each class is the model's confidence.
    classes = prediction.predictions[0]
    return {"accuracy": round(float(np.mean(classes == prediction.label_ids)), 6)}


def _energies(log: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Arrange the energies of a log in columns of one value a step, with four digits."""
    steps: dict[int, dict[str, float]] = {}
    for entry in log:
        for name in ENERGIES:
            value = entry.get(ENERGY_PREFIX + name)
            if value is not None and math.isfinite(value):
                steps.setdefault(entry["step"], {})[name] = float(f"{value:.4g}")
    return {
        "energy_step": list(steps),
        **{f"energy_{name}": [values.get(name) for values in steps.values()] for name in ENERGIES},
    }


def _provenance(place: Place) -> dict[str, Any]:
    """Say where this process runs, with which versions."""
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
