"""Collect what classifiers read of images, without training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import InputError
from ..heads import Head, base_model, num_features
from ..layers import merge, moments


@dataclass
class HeadFeatures:
    """Hold what a head read of labelled images, in this process.

    Args:
        rows (`torch.Tensor` of shape `(n, K)`): features of each image, averaged over positions.
        labels (`torch.Tensor` of shape `(n,)`): int64, the class of each image.
        count (`torch.Tensor`): float64 scalar, images times positions.
        mean (`torch.Tensor` of shape `(K,)`): float64, over images and positions.
        squares (`torch.Tensor` of shape `(K,)`): float64, sum of squared distances from `mean`.
    """

    rows: Tensor
    labels: Tensor
    count: Tensor
    mean: Tensor
    squares: Tensor

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Compute the mean and the biased variance of each feature over all processes: two float64 `(K,)` tensors."""
        total = sum_over_ranks(self.count.clone())
        mean = sum_over_ranks(self.mean * self.count) / total.clamp(min=1)
        spread = self.squares + self.count * (self.mean - mean).square()
        return mean, sum_over_ranks(spread) / total.clamp(min=1)


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def per_process(samples: int) -> int:
    """Divide a number of samples by the number of processes, rounded up."""
    return -(-samples // (dist.get_world_size() if is_distributed() else 1))


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all processes, in place."""
    if is_distributed():
        dist.all_reduce(values)
    return values


@torch.no_grad()
def collect_features(
    model: nn.Module, heads: list[Head], batches: Iterable[Any], max_samples: int, num_classes: int | None = None
) -> list[HeadFeatures]:
    """Run a model over images in eval mode and keep what its heads read: one [`HeadFeatures`] a head, in their order.

    Args:
        batches (iterable):
            This process's: mappings of the model's inputs and `labels`, or pairs of images and labels. Labels are
            class indices, negative where an image is to be ignored, or rows of probabilities, whose largest counts.
        max_samples (`int`): images that are kept in this process; no batch is read after them.
        num_classes (`int`, *optional*): C; a label must be below it.

    Raises:
        InputError: a batch has another form, or a label is none of the classes.
    """
    kept = [_Collector(head) for head in heads]
    left = max_samples
    with restored_modes(model), torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        model.eval()
        read: dict[int, Tensor] = {}
        for index, head in enumerate(heads):
            hook = head.module.register_forward_pre_hook(lambda _, args, index=index: read.update({index: args[0]}))
            stack.callback(hook.remove)
        for batch in batches:
            inputs, targets = inputs_and_labels(batch)
            labels = class_indices(targets, num_classes)
            counted = torch.nonzero(labels >= 0)[:left, 0]
            read.clear()
            if len(counted):
                run_model(model, inputs)
            for index, features in read.items():
                if len(features) != len(labels):
                    raise InputError(
                        f"{heads[index].path} reads {len(features)} rows of a batch of {len(labels)} labels: give one "
                        "label for each image."
                    )
                kept[index].keep(features, labels, counted)
            left -= len(counted)
            if left <= 0:
                break
    return [collector.features() for collector in kept]


@torch.no_grad()
def collect_statistics(
    model: nn.Module, heads: list[Head], batches: Iterable[Any], evaluate: Callable[[Any], Any]
) -> list[tuple[Tensor, Tensor]]:
    """Compute the mean and the variance of what heads read in eval mode, over images, positions and processes.

    Args:
        batches (iterable): This process's.
        evaluate (`Callable`): Runs the model on one of them.

    Returns:
        `list[tuple[torch.Tensor, torch.Tensor]]`: float64 `(K,)` each, one pair a head.
    """
    kept = [_Collector(head) for head in heads]
    with restored_modes(model), torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        model.eval()
        for head, collector in zip(heads, kept, strict=True):
            hook = head.module.register_forward_pre_hook(partial(_count, collector))
            stack.callback(hook.remove)
        for batch in batches:
            evaluate(batch)
    return [collector.features().statistics() for collector in kept]


def inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    """Take a batch apart: a mapping with `labels`, or a pair."""
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor) and len(batch) > 1:
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    if isinstance(batch, (list, tuple)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    what = f"a mapping of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise InputError(
        f"A batch is {what}. Give mappings of a model's inputs and labels, as Trainer's data loaders give them, or "
        "pairs of images and labels."
    )


def class_indices(labels: Tensor, num_classes: int | None = None) -> Tensor:
    """Convert labels (N,) or (N, C) to int64 class indices, negative where the image is ignored.

    Of a row of probabilities, the largest counts. Labels must be below `num_classes`.
    """
    if labels.is_floating_point():
        if labels.ndim != 2 or num_classes not in (None, labels.shape[1]):
            raise InputError(f"Labels have the shape {tuple(labels.shape)}, and the head has {num_classes} classes.")
        return labels.argmax(1)
    labels = labels.flatten().long()
    if num_classes is not None and len(labels) and int(labels.max()) >= num_classes:
        raise InputError(
            f"Label {int(labels.max())} is none of the head's {num_classes} classes, which are counted from 0. Give "
            f'the head as many as the data has: apply_entame(model, EntameConfig.for_method("keep"), num_labels=...).'
        )
    return labels


def run_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a batch's inputs, in its device and dtype; transformers' models take inputs by name."""
    weight = next(model.parameters())

    def ready(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(weight.device, weight.dtype if value.is_floating_point() else None)

    if isinstance(inputs, Mapping) and isinstance(base_model(model), PreTrainedModel):
        return model(**{name: ready(value) for name, value in inputs.items()})
    return model(*map(ready, inputs.values() if isinstance(inputs, Mapping) else [inputs]))


def _count(collector: _Collector, module: nn.Module, args: tuple[Any, ...]) -> None:
    collector.add(args[0])


class _Collector:
    """Gather one head's features, batch by batch."""

    def __init__(self, head: Head) -> None:
        self.dim = -1 if isinstance(head.module, nn.Linear) else -3
        self.rows: list[Tensor] = []
        self.labels: list[Tensor] = []
        width, weight = num_features(head.module), head.module.weight
        # MPS has no float64.
        self.device = torch.device("cpu") if weight.device.type == "mps" else weight.device
        self.moments = torch.zeros(3, width, dtype=torch.float64, device=self.device)
        self.empty = torch.empty(0, width, dtype=weight.dtype, device=self.device)

    def add(self, features: Tensor) -> Tensor:
        """Count features in the statistics, and return them with a row for each image."""
        here = features.to(self.device).movedim(self.dim, -1)
        self.moments = merge(torch.stack([self.moments, moments(here.double(), -1)]))
        return here

    def keep(self, features: Tensor, labels: Tensor, counted: Tensor) -> None:
        here = self.add(features[counted.to(features.device)])
        rows = here if here.ndim == 2 else here.flatten(1, -2).double().mean(1).float()
        self.rows.append(rows)
        self.labels.append(labels.to(self.device)[counted.to(self.device)])

    def features(self) -> HeadFeatures:
        rows = torch.cat(self.rows) if self.rows else self.empty
        labels = torch.cat(self.labels) if self.labels else torch.empty(0, dtype=torch.long, device=self.device)
        counts, mean, squares = self.moments
        return HeadFeatures(rows, labels, counts[0], mean, squares)


@contextmanager
def restored_modes(model: nn.Module) -> Iterator[None]:
    """Put each module back into the training or eval mode that it was in before this context."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
