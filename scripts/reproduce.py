"""Compare ENTAME with its peers on real weights and real images: EfficientNet-Lite0 on MNIST-5k, several seeds.

    python scripts/reproduce.py --results scripts/results/lite0_mnist5k.jsonl

Every run goes through `EntameTrainer` and leaves one JSON line; runs whose line is there already are skipped. The
table of all lines is printed at the end, and the accuracy over the steps is drawn beside the lines.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

import accelerate
import numpy as np
import timm
import torch
import transformers
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, apply_entame
from entame_hf.callbacks import EarlyEvaluation
from entame_hf.config import Method
from entame_hf.demo import demo_dataset, demo_model
from entame_hf.metrics import metrics_of_predictions, predicted_classes
from entame_hf.plots import accuracy_curves, save_figures

EARLY_STEPS = 10
TRAIN_SIZE, BATCH = 4000, 256
# What makes two runs of one method and seed comparable.
SETTINGS = ("learning_rate", "epochs", "max_grad_norm", "side", "split_seed")


class TensorImages(Dataset):
    """Images in memory, flipped at random in training."""

    def __init__(self, images: Tensor, labels: Tensor, flip: bool) -> None:
        self.images, self.labels, self.flip = images, labels, flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image = self.images[index]
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return {"pixel_values": image, "labels": self.labels[index]}


def mnist_5k(side: int, split_seed: int) -> tuple[TensorImages, TensorImages]:
    rows = demo_dataset()["train"]
    images = torch.stack([pil_to_tensor(image) for image in rows["image"]]).float().expand(-1, 3, -1, -1) / 255
    images = interpolate(images, size=(side, side), mode="bilinear", align_corners=False)
    labels = torch.tensor(rows["label"])
    order = torch.from_numpy(np.random.RandomState(split_seed).permutation(len(labels)))
    train, test = order[:TRAIN_SIZE], order[TRAIN_SIZE:]
    std, centre = torch.std_mean(images[train], dim=(0, 2, 3), keepdim=True)
    images = (images - centre) / std
    return TensorImages(images[train], labels[train], flip=True), TensorImages(images[test], labels[test], flip=False)


def one_run(method: str, seed: int, options: argparse.Namespace, data: tuple[TensorImages, TensorImages]) -> Any:
    args = EntameTrainingArguments(
        tempfile.mkdtemp(),
        entame_method=method,
        seed=seed,
        learning_rate=options.learning_rate,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=1000,
        dataloader_drop_last=True,
        dataloader_pin_memory=False,
        max_grad_norm=options.max_grad_norm,
        bf16=torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="no",
        energy_logging_steps=1,
        logging_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(seed)
    model = apply_entame(demo_model(), EntameConfig.for_method("keep"), num_labels=10)
    trainer = EntameTrainer(
        model=model,
        args=args,
        train_dataset=data[0],
        eval_dataset=data[1],
        compute_metrics=metrics_of_predictions(),
        preprocess_logits_for_metrics=predicted_classes,
        callbacks=[EarlyEvaluation(EARLY_STEPS)],
    )
    trainer.train()
    log = trainer.state.log_history
    accuracy = {entry["step"]: entry["eval_accuracy"] for entry in log if "eval_accuracy" in entry}
    steps_per_epoch = TRAIN_SIZE // BATCH
    return {
        "method": method,
        "seed": seed,
        "noise_share": next(entry["energy/noise_share"] for entry in log if "energy/noise_share" in entry),
        "accuracy_by_step": [accuracy[step] for step in range(1, EARLY_STEPS + 1)],
        "accuracy_by_epoch": [accuracy[steps_per_epoch * (epoch + 1)] for epoch in range(options.epochs)],
        **{name: getattr(options, name) for name in SETTINGS},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, timm, accelerate)},
        "command": "python " + shlex.join(sys.argv),
    }


def table(lines: list[dict[str, Any]]) -> str:
    rows = [
        "| method | seeds | noise share at step 0 | mean of first 10 steps | after 10 steps | epoch 3 | final |",
        "|---|---|---|---|---|---|---|",
    ]

    def spread(values: list[float]) -> str:
        return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f}" if len(values) > 1 else f"{100 * values[0]:.1f}"

    for method in get_args(Method):
        runs = [line for line in lines if line["method"] == method]
        if runs:
            columns = [
                spread([run["noise_share"] for run in runs]),
                spread([mean(run["accuracy_by_step"]) for run in runs]),
                spread([run["accuracy_by_step"][-1] for run in runs]),
                spread([run["accuracy_by_epoch"][min(2, run["epochs"] - 1)] for run in runs]),
                spread([run["accuracy_by_epoch"][-1] for run in runs]),
            ]
            rows.append(f"| {method} | {len(runs)} | {' | '.join(columns)} |")
    return "\n".join(rows)


def accuracy_over_steps(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    runs: dict[str, list[Any]] = {}
    for line in lines:
        early, later = line["accuracy_by_step"], line["accuracy_by_epoch"]
        # The first step is 1, and an epoch ends with a whole batch.
        steps = [*range(1, len(early) + 1), *(TRAIN_SIZE // BATCH * (epoch + 1) for epoch in range(len(later)))]
        runs.setdefault(line["method"], []).append((steps, early + later))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="file that JSON lines are appended to")
    parser.add_argument("--methods", nargs="+", choices=get_args(Method), default=["base", "keep", "mei", "entame"])
    parser.add_argument("--seeds", type=int, default=6, help="number of seeds, counted from 0")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument(
        "--max_grad_norm", type=float, default=0.0, help="clip gradients to this; 0 is off, as in the paper"
    )
    parser.add_argument(
        "--split_seed", type=int, default=0, help="seed of the permutation that sets 1,000 digits aside"
    )
    parser.add_argument("--side", type=int, default=64, help="side of the images in pixels")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.touch()
    lines = [json.loads(line) for line in options.results.read_text().splitlines()]
    settings = {name: getattr(options, name) for name in SETTINGS}
    lines = [line for line in lines if settings.items() <= line.items()]
    done = {(line["method"], line["seed"]) for line in lines}
    data = mnist_5k(options.side, options.split_seed)
    for seed in range(options.seeds):
        for method in options.methods:
            if (method, seed) in done:
                continue
            lines.append(one_run(method, seed, options, data))
            with options.results.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    print(table(lines))
    picture = accuracy_curves(accuracy_over_steps(lines), title="EfficientNet-Lite0 on MNIST-5k")
    save_figures({options.results.stem: picture}, options.results.parent)


if __name__ == "__main__":
    main()
