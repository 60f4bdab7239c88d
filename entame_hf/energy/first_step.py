"""Measure a head's first step, on features that all candidate heads share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from ..errors import InputError
from ..heads import Head
from ..patch import class_indices, restored_modes, run_model
from .error import error_energy


@contextmanager
def unchanged(model: nn.Module, heads: list[Head]) -> Iterator[None]:
    """Put the model, but its heads, into training mode while this context lasts; afterwards it is what it was."""
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    with restored_modes(model):
        model.train()
        for head in heads:
            head.module.eval()
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers.items():
                    buffer.copy_(before)


def label_rows(labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Build a row of probabilities for each example, and a mask of the examples that are not ignored."""
    if labels.is_floating_point():
        if labels.ndim != 2 or labels.shape[1] != classes:
            raise InputError(f"Labels have the shape {tuple(labels.shape)}, and the head has {classes} classes.")
        return labels.float(), torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    labels = class_indices(labels, classes)
    return one_hot(labels.clamp(min=0), classes).float(), labels >= 0


@torch.no_grad()
def backbone_features(model: nn.Module, heads: list[Head], images: Any) -> tuple[list[Tensor], bool]:
    """Run the backbone once; return the heads' inputs, and whether the logits are the mean of the heads' outputs."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(path: str, leaf: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        inputs[path], outputs[path] = args[0], output.float()

    with ExitStack() as stack:
        for head in heads:
            handle = head.module.register_forward_hook(lambda *call, path=head.path: note(path, *call))
            stack.callback(handle.remove)
        given: Any = run_model(model, images)
    missed = [head.path for head in heads if head.path not in inputs]
    if missed:
        raise InputError(f"The model did not use {', '.join(missed)} in training mode: name its heads with head=...")
    logits: Any = given.get("logits") if isinstance(given, dict) else given
    mean = _mean([(head.module, outputs[head.path]) for head in heads])
    alone = isinstance(logits, Tensor) and logits.shape == mean.shape
    alone = alone and torch.allclose(logits.float(), mean, rtol=1e-2, atol=1e-3)
    return [inputs[head.path] for head in heads], alone


def _mean(outputs: Iterable[tuple[nn.Module, Tensor]]) -> Tensor:
    """Average outputs over heads and positions."""
    rows = [out.movedim(-1 if isinstance(leaf, nn.Linear) else -3, -1) for leaf, out in outputs]
    return torch.stack([row.flatten(1, -2).mean(1) if row.ndim > 2 else row for row in rows]).mean(0)


def first_step(leaves: nn.ModuleList, features: list[Tensor], targets: Tensor, counted: Tensor) -> Tensor:
    """Sum over a batch: the loss, the energies at the logits, and those of error and noise at the features."""
    # Heads may share features.
    inputs = {id(x): x.detach().float().requires_grad_() for x in features}
    with torch.enable_grad(), torch.autocast(features[0].device.type, enabled=False):
        logits = _mean((leaf, leaf(inputs[id(x)])) for leaf, x in zip(leaves, features, strict=True))
    estimates = logits.detach().softmax(-1)

    def sent_back(error: Tensor) -> Tensor:
        gradients = torch.autograd.grad(logits, list(inputs.values()), error * counted[:, None], retain_graph=True)
        return torch.stack([gradient.square().sum() for gradient in gradients]).sum()

    logits_, targets_ = logits.detach()[counted], targets[counted]
    loss = cross_entropy(logits_, targets_, reduction="sum")
    energies = torch.stack(error_energy(logits_, targets_)) * len(logits_)
    return torch.stack([loss, *energies, sent_back(estimates - targets), sent_back(estimates)])
