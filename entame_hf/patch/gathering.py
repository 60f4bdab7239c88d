"""Gather parameters that are sharded over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def is_zero3_sharded(module: nn.Module) -> bool:
    """Check whether DeepSpeed's ZeRO-3 has sharded a module's parameters, which leaves empty tensors behind."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def is_sharded(module: nn.Module) -> bool:
    """Check whether ZeRO-3 or FSDP2 has sharded a module's parameters."""
    return is_zero3_sharded(module) or any(isinstance(parameter, DTensor) for parameter in module.parameters())


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 gathered for a forward. A change of those would be lost."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered_parameters(leaf: nn.Module) -> Iterator[None]:
    """Gather a leaf's parameters on every process while this context lasts; rank 0's changes are kept.

    ZeRO-3 ignores changes of sharded parameters, and FSDP2's shards do not mix with tensors.
    """
    if is_zero3_sharded(leaf):
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(leaf.parameters()), modifier_rank=0):
            yield
        return
    shards = {name: shard for name, shard in leaf.named_parameters(recurse=False) if isinstance(shard, DTensor)}
    for name, shard in shards.items():
        setattr(leaf, name, nn.Parameter(shard.full_tensor().detach(), requires_grad=shard.requires_grad))
    try:
        yield
        with torch.no_grad():
            for name, shard in shards.items():
                shard.copy_(distribute_tensor(getattr(leaf, name).detach(), shard.device_mesh, shard.placements))
    finally:
        # FSDP2 needs the same objects again.
        for name, shard in shards.items():
            setattr(leaf, name, shard)
