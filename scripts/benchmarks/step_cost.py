"""Time a training step: EntameTrainer's beside Trainer's, and with energies measured beside without."""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from entame_hf import EntameTrainer, EntameTrainingArguments

from .throughput import OnDevice, model_of
from .timers import BlockTimer, StepTimer


def train(kind: type[Trainer], options: argparse.Namespace, args: TrainingArguments, timer: TrainerCallback) -> None:
    """Train on images on the device: a ResNet-50 at 224 px on a GPU, an EfficientNet-Lite0 at 64 px on a CPU."""
    name, side = ("resnet50", 224) if args.device.type == "cuda" else ("tf_efficientnet_lite0", 64)
    torch.manual_seed(0)
    data = OnDevice(4 * options.batch, side)
    trainer = kind(model_of(name, side), args, train_dataset=data, data_collator=data.collate, callbacks=[timer])
    # The log is not the result here.
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def quiet_arguments(options: argparse.Namespace, kind: type[TrainingArguments], **changes: Any) -> TrainingArguments:
    return kind(
        tempfile.mkdtemp(),
        per_device_train_batch_size=options.batch,
        learning_rate=1e-4,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        **changes,
    )


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps of both trainers in bf16 on a GPU, in pairs."""

    def seconds_per_step(kind: type[Trainer]) -> float:
        timer = StepTimer(skip=25)
        args = quiet_arguments(options, TrainingArguments, max_steps=25 + options.steps, logging_steps=options.steps)
        train(kind, options, args, timer)
        return timer.median()

    pairs = []
    for repeat in range(options.repeats + 1):
        # Each runs first in half of the pairs, as the second one runs on a warm card.
        order = (Trainer, EntameTrainer) if repeat % 2 else (EntameTrainer, Trainer)
        times = {kind.__name__: seconds_per_step(kind) for kind in order}
        if repeat:  # cuDNN chooses its kernels in the first pair.
            pairs.append(times)
    ratios = [pair["EntameTrainer"] / pair["Trainer"] for pair in pairs]
    return {
        "batch": options.batch,
        "milliseconds_per_step_trainer": 1e3 * median(pair["Trainer"] for pair in pairs),
        "milliseconds_per_step_entame_trainer": 1e3 * median(pair["EntameTrainer"] for pair in pairs),
        "ratio_median": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "pairs": len(pairs),
    }


def energy(options: argparse.Namespace) -> dict[str, Any]:
    """Time blocks of ten steps of one training in turn: no step measured, one (as scripts/finetune.py logs), all.

    Each block is compared with the unmeasured blocks before and after it.
    """
    steps, skip = 10, 30
    cadences = {"none": 0, "one_in_ten": 1, "none_again": 0, "all": sys.maxsize}
    blocks = len(cadences) * options.repeats
    args = quiet_arguments(options, EntameTrainingArguments, max_steps=skip + steps * blocks + 1, logging_steps=steps)
    # The recorder reads this argument after on_step_begin.
    settings = {name: partial(setattr, args, "energy_logging_steps", cadence) for name, cadence in cadences.items()}
    timer = BlockTimer(steps, skip, settings)
    train(EntameTrainer, options, args, timer)
    times = timer.milliseconds()
    result: dict[str, Any] = {"batch": options.batch, "milliseconds_per_step": median(times["none"])}
    for name, around in (("one_in_ten", ("none", "none_again")), ("all", ("none_again", "none"))):
        before, after = (times[other] for other in around)
        # The block after "all" is the next round's first.
        after = after if name == "one_in_ten" else after[1:]
        ratios = [2 * time_ / (a + b) for time_, a, b in zip(times[name], before, after, strict=False)]
        result |= {
            f"ratio_{name}_median": median(ratios),
            f"ratio_{name}_min": min(ratios),
            f"ratio_{name}_max": max(ratios),
        }
    return result | {"rounds": options.repeats}
