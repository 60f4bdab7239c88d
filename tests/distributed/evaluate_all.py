"""Evaluations of one model, in one process or in several, of tables and of streams."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import TINY_VIT, RandomImages
from datasets import ClassLabel, Features
from datasets import Dataset as Table
from datasets import Image as ImageFeature
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import Dataset, IterableDataset
from transformers import EvalPrediction, ViTConfig, ViTForImageClassification, ViTImageProcessor

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.data import ClassificationDataset, Preparation, StreamingDataset, set_image_size

COUNT = 22
# In the last batch, some of 2 or 3 processes have a part of one, or no example at all.
BATCHES = (3, 8, 50)
WEIGHTS = torch.linspace(0, 2, 10)


class Shares(RandomImages):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return {**item, "labels": 0.7 * one_hot(item["labels"], 10) + 0.03}


class Unlabelled(RandomImages):
    """Some labels are left out, and all of some batches."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        return {**item, "labels": item["labels"].clone().fill_(-100)} if index % 4 == 0 or index > 16 else item


class Stream(IterableDataset):
    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __iter__(self):
        return (self.data[i] for i in range(COUNT))


def pictures() -> Table:
    """Undecoded images, one of which cannot be read."""
    images = []
    for i in range(COUNT):
        buffer = BytesIO()
        pixels = np.random.default_rng(i).normal(25 * (i % 10), 20, (32, 32, 3)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(buffer, "PNG")
        images.append({"bytes": b"<html>" if i == 5 else buffer.getvalue(), "path": None})
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=[*"0123456789"])})
    return Table.from_dict({"image": images, "label": [i % 10 for i in range(COUNT)]}, features=features)


def sum_over_number(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    return cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch


def own_metrics(prediction: EvalPrediction) -> dict[str, float]:
    assert len(prediction.losses) == len(prediction.label_ids) == len(prediction.predictions)
    return {"examples": len(prediction.losses), "mean_loss": float(prediction.losses.mean())}


def evaluations() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Datasets, with what the trainer and its arguments are given."""
    images, table = RandomImages(COUNT, seed=1), pictures()
    columns = ("image", "label", Preparation(set_image_size(ViTImageProcessor(), 32), exact=False))
    measured = {"compute_metrics": own_metrics}, {"include_for_metrics": ["loss"]}
    return {
        "table": (images, *measured),
        "stream": (Stream(images), *measured),
        "stream-read-by-all": (Stream(images), {}, {"accelerator_config": {"dispatch_batches": False}}),
        "smoothed": (images, {}, {"label_smoothing_factor": 0.1}),
        "weighted": (images, {"class_weights": WEIGHTS}, {}),
        "shares": (Shares(COUNT, seed=1), {}, {}),
        "unlabelled": (Unlabelled(COUNT, seed=1), {}, {}),
        "own-loss": (images, {"compute_loss_func": sum_over_number}, {}),
        "pictures": (ClassificationDataset(table, *columns, cache_gb=0, evaluation=True), {}, {}),
        "streamed-pictures": (StreamingDataset(table.to_iterable_dataset(2), *columns, evaluation=True), {}, {}),
    }


def main(folder: str) -> None:
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(num_labels=10, **TINY_VIT))
    with torch.no_grad():
        # Losses of a head that was just drawn differ too little to tell means apart.
        model.classifier.weight.mul_(30)
    results: dict[str, dict[str, Any]] = {}
    for name, (data, given, options) in evaluations().items():
        args = EntameTrainingArguments(folder, use_cpu=True, report_to="none", disable_tqdm=True, **options)
        trainer = EntameTrainer(model, args, **given)
        results[name] = {"metrics": []}
        for args.per_device_eval_batch_size in BATCHES:
            results[name]["metrics"].append(trainer.evaluate(data))
        predicted = trainer.predict(data)
        results[name]["metrics"].append({f"eval_{k.removeprefix('test_')}": v for k, v in predicted.metrics.items()})
        results[name].update(logits=torch.tensor(predicted.predictions), labels=torch.tensor(predicted.label_ids))
    torch.save(results, Path(folder, f"rank{args.process_index}.pt"))
