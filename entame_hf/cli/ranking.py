"""Rank pretrained checkpoints by how well their features fit the images, before any is fine-tuned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ..data import ClassificationDataset, Preparation, Splits, set_image_size
from ..errors import InputError
from ..patch import Probe, probe_features
from ..trainer import sampled_batches
from .arguments import ModelArguments, RunArguments, check_given
from .data_arguments import DataArguments
from .model import load_classifier


@dataclass
class RankingArguments:
    """Say which checkpoints are ranked."""

    models: list[str] | None = field(
        default=None, metadata={"help": "Rank these checkpoints by a linear probe on --data_dir or --dataset_name."}
    )


@dataclass(frozen=True)
class RankedCheckpoint:
    """Say what was found of a checkpoint."""

    name: str
    probe: Probe
    size: tuple[int, int]
    seconds: float


def rank_checkpoints(
    models: Sequence[str],
    splits: Splits,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
) -> list[RankedCheckpoint]:
    """Rank checkpoints by the leave-one-out accuracy of a linear probe on the training images.

    Each checkpoint sees the same images, at most `informed_samples` with the classes' proportions, prepared by its own
    processor. Only the features count: a checkpoint's head may be one for other classes.
    """
    if data_args.streaming:
        raise InputError("A stream has no rows to compare models on: leave `streaming` out.")
    found = []
    for name in models:
        began = time.monotonic()
        model: Any
        model, processor = load_classifier(
            name,
            splits.class_names,
            revision=model_args.model_revision,
            trust_remote_code=model_args.trust_remote_code,
        )
        if model_args.image_size is not None:
            processor = set_image_size(processor, model_args.image_size)
        preparation = Preparation(processor, exact=False)
        images = ClassificationDataset(
            splits.train,
            splits.image_column,
            splits.label_column,
            preparation,
            evaluation=True,
            cache_gb=data_args.image_cache_gb,
        )
        probe = probe_dataset(model.to(args.device), images, args)
        found.append(RankedCheckpoint(name, probe, preparation.output_size, time.monotonic() - began))
    return sorted(found, key=lambda one: (one.probe.accuracy, one.probe.logme), reverse=True)


def probe_dataset(model: Any, images: ClassificationDataset, args: RunArguments) -> Probe:
    """Probe a model on images as evaluation sees them: see [`probe_features`]. To be called in all processes."""
    with closing(sampled_batches(images, args.informed_samples, "Reading features", args)) as batches:
        return probe_features(model, batches, num_classes=images.pipeline.num_classes)


def ranking_table(ranking: Sequence[RankedCheckpoint]) -> str:
    """Write a ranking as lines of text."""
    width = max(len("checkpoint"), *(len(one.name) for one in ranking))
    lines = [
        f"Linear probe on {ranking[0].probe.samples:,} training images, by leaving one out",
        f"{'checkpoint':{width}}  accuracy   LogME  image size  seconds",
    ]
    for one in ranking:
        size = "×".join(map(str, one.size))
        cells = f"{one.probe.accuracy:8.1%}  {one.probe.logme:6.3f}  {size:>10}  {one.seconds:7.0f}"
        lines.append(f"{one.name:{width}}  {cells}")
    return "\n".join(lines)


def check_ranking(models: Sequence[str], model_args: ModelArguments, data_args: Any, args: RunArguments) -> None:
    """Refuse a ranking without data, or with a model that is not in it."""
    if model_args.model_name_or_path is not None:
        raise InputError(
            f"`models` ranks checkpoints and `model_name_or_path={model_args.model_name_or_path}` inspects one: give "
            "one of them."
        )
    model_args.model_name_or_path = models[0]
    check_given(model_args, data_args, args)
