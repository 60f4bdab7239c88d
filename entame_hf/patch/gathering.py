"""Parameters that processes hold shards of, gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def is_zero3_sharded(module: nn.Module) -> bool:
    """Tell whether DeepSpeed's ZeRO-3 has taken a module's parameters apart: what is left of them is empty."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def is_sharded(module: nn.Module) -> bool:
    """Tell whether processes hold parts of a module's parameters each, by ZeRO-3 or by FSDP2."""
    return is_zero3_sharded(module) or any(isinstance(parameter, DTensor) for parameter in module.parameters())


def reshard(model: nn.Module) -> None:
    """Let go of the parameters that FSDP2 put together for a forward: what is written to them would be lost."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered_parameters(leaf: nn.Module) -> Iterator[None]:
    """Put a leaf's parameters together on every process while this context lasts; what the first one writes stays.

    Writing to what ZeRO-3 leaves of a parameter would silently write nothing, and FSDP2's parts do not mix with
    tensors.
    """
    if is_zero3_sharded(leaf):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(leaf.parameters()), modifier_rank=0):
            yield
        return
    parts = {name: part for name, part in vars(leaf)["_parameters"].items() if isinstance(part, DTensor)}
    for name, part in parts.items():
        setattr(leaf, name, nn.Parameter(part.full_tensor().detach(), requires_grad=part.requires_grad))
    try:
        yield
        with torch.no_grad():
            for name, part in parts.items():
                part.copy_(distribute_tensor(getattr(leaf, name).detach(), part.device_mesh, part.placements))
    finally:
        # FSDP2 goes on with the same objects.
        for name, part in parts.items():
            setattr(leaf, name, part)
