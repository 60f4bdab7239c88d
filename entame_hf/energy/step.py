"""Measure the energy of the error in one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.nn.utils import get_total_norm

from ..heads import Head, num_classes, num_features
from ..layers import merge, moments, widen
from .error import ErrorEnergy, fraction_of_error, measured

SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP)


class StepEnergies:
    """Sum a step's energies on the device, and read them once at its end.

    A diagnosis must never stop a run: ignored labels, other shapes and other tasks' outputs are skipped.

    Args:
        heads (`list[Head]`): what [`find_heads`] finds in the model in training.
        device (`torch.device`): the model's.
    """

    def __init__(self, heads: list[Head], device: torch.device) -> None:
        self.heads = heads
        self.classes = num_classes(heads[0].module)
        names = ("rows", "examples", "arrivals", "squares", *ErrorEnergy._fields)
        self._sums = {name: torch.zeros((), device=device) for name in names}
        widths = [num_features(head.module) for head in heads]
        # For each feature of each head: count, mean, sum of squared deviations.
        self._features = torch.zeros(3, sum(widths), device=device)
        self._slots = self._features.split(widths, dim=1)
        # What the first head read last.
        self.features: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._norms: dict[str, Tensor] = {}
        self._loss_scale = 1.0

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Read the heads' inputs in a forward, and later, by hooks on these, their gradients."""
        with ExitStack() as stack:
            for index, head in enumerate(self.heads):
                handle = head.module.register_forward_pre_hook(partial(self._read, index))
                stack.callback(handle.remove)
            yield
        self._inputs.clear()

    @torch.no_grad()
    def _read(self, index: int, leaf: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return
        seen = moments(widen(x.detach()), -1 if isinstance(leaf, nn.Linear) else -3).float()
        slot = self._slots[index]
        slot.copy_(merge(torch.stack([slot, seen])))
        if index == 0:
            self.features = x.detach()
            self._sums["rows"] += len(x)
        # Heads may share an input, whose gradient is then the sum of all their errors.
        if x.requires_grad and not any(x is other for other in self._inputs):
            self._inputs.append(x)
            x.register_hook(self._arrive)

    @torch.no_grad()
    def _arrive(self, gradient: Tensor) -> None:
        self._sums["arrivals"] += 1
        self._sums["squares"] += gradient.float().square().sum()

    def add_error(self, logits: Any, labels: Any, smoothing: float = 0.0) -> None:
        """Add the energy of a micro-batch, weighted by its examples: see [`energy_of_batch`]."""
        number, energy = energy_of_batch(logits, labels, smoothing) or (0, None)
        if energy is not None:
            self._sums["examples"] += number
            for name, value in energy._asdict().items():
                self._sums[name] += value * number

    def add_gradients(self, model: nn.Module, accelerator: Accelerator) -> None:
        """Read the norms of the gradients, and the factor that scaled the loss."""
        if accelerator.scaler is not None:
            self._loss_scale = accelerator.scaler.get_scale()
        elif accelerator.distributed_type == DistributedType.DEEPSPEED and accelerator.mixed_precision == "fp16":
            # DeepSpeed has its own factor.
            self._loss_scale = math.nan
        if accelerator.distributed_type in SHARDED:
            return
        heads = {id(parameter) for head in self.heads for parameter in head.module.parameters()}
        gradients: dict[str, list[Tensor]] = {"backbone": [], "head": []}
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradients["head" if id(parameter) in heads else "backbone"].append(parameter.grad)
        self._norms = {f"grad_norm_{part}": get_total_norm(found) for part, found in gradients.items()}

    @torch.no_grad()
    def results(self, accelerator: Accelerator) -> tuple[int, dict[str, float]]:
        """Compute the step's values over all processes: a collective call.

        Returns:
            The number of examples, and the values by name; not finite where something overflowed.
        """
        # One collective, of the same shape in all processes, and one transfer to the host.
        mine = torch.cat([torch.stack(list(self._sums.values())), self._features.flatten()])
        table = accelerator.gather(mine[None])
        scalars, features = table.split([len(self._sums), self._features.numel()], dim=1)
        sums = dict(zip(self._sums, scalars.sum(0), strict=True))
        count, mean, squares = merge(features.unflatten(1, self._features.shape))
        known = count.clamp(max=1).sum()
        energy = ErrorEnergy(*(sums[name] / sums["examples"] for name in ErrorEnergy._fields))
        # The ratio of means, as defined; not the mean of ratios.
        energy = energy._replace(noise_share=fraction_of_error(energy.estimates, energy.total))
        examples = torch.where(sums["examples"] > 0, sums["examples"], sums["rows"])
        # A process's loss is the mean over its own examples, and gradients are averaged over processes.
        arrived = sums["squares"] * examples / (len(table) * self._loss_scale) ** 2
        arrived = torch.where(sums["arrivals"] > 0, arrived, torch.nan)
        values = {
            **energy._asdict(),
            "entropy_share": energy.entropy / math.log(self.classes),
            "features": arrived,
            "features_share": fraction_of_error(arrived, energy.total),
            "feature_mean": mean.sum() / known,
            "feature_var": (squares / count.clamp(min=1)).sum() / known,
            **{name: norm.to(mine.device) / self._loss_scale for name, norm in self._norms.items()},
        }
        if accelerator.distributed_type not in SHARDED:
            weights = [head.module.weight for head in self.heads]
            energies = torch.stack([weight.float().square().sum() for weight in weights])
            values["head_weights"] = energies.sum() / sum(weight.numel() for weight in weights)
        number, *numbers = torch.stack([examples, *(value.float() for value in values.values())]).tolist()
        return int(number), dict(zip(values, numbers, strict=True))


@torch.no_grad()
def energy_of_batch(logits: Any, labels: Any, smoothing: float = 0.0) -> tuple[int, ErrorEnergy] | None:
    """Measure the energy of a batch's error, and count its examples.

    Args:
        logits (`torch.Tensor` of shape `(N, C)`): anything else is skipped.
        labels (`torch.Tensor` of shape `(N,)`, `(N, 1)` or `(N, C)`):
            Class indices, of which those outside of the classes are skipped, or a row of probabilities each.
        smoothing (`float`, *optional*, defaults to 0.0): the loss's label smoothing.

    Returns:
        `tuple` or `None`: no example is left.
    """
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not isinstance(labels, Tensor):
        return None
    if labels.numel() == len(logits) and not labels.is_floating_point():
        labels = labels.flatten()
        counted = (labels >= 0) & (labels < logits.shape[1])
        logits, labels = logits[counted], labels[counted]
        if smoothing:
            labels = one_hot(labels, logits.shape[1])
    elif labels.shape != logits.shape:
        return None
    if smoothing:
        labels = (1 - smoothing) * labels + smoothing / logits.shape[1]
    return (len(logits), measured(logits, labels)) if len(logits) else None
