"""z-normalisation across a batch: the layer, then the classifiers that use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import InputError
from .statistics import BatchStatistics, batch_statistics, standardise, widen, z_norm


class ZNorm(nn.Module):
    """Normalise features, by the batch's statistics in training mode and by the stored ones in eval mode.

    The stored statistics are the exact weighted mean of the batches' statistics. A batch of n samples has weight
    m = `momentum * n / largest_batch`, and each later batch scales it by 1 − m. Under `momentum=1` a full batch
    replaces the statistics, and a partial last batch barely moves them. They are float32, or float64 where the
    classifier is.

    Source: equation 19 of [ENTAME](https://arxiv.org/abs/1905.10698); batch normalisation without parameters. The
    weighted mean corrects for its start as [Adam](https://arxiv.org/abs/1412.6980), section 3, does.
    """

    mean: Tensor
    var: Tensor
    largest_batch: Tensor
    total_weight: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float = 1.0,
        sync: bool = True,
        dim: int = -1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not (eps > 0 and 0 < momentum <= 1):
            raise InputError(f"`eps={eps}` must be positive, and `momentum={momentum}` in (0, 1].")
        wide = torch.promote_types(dtype or torch.float32, torch.float32)
        self.num_features, self.dim = num_features, dim
        self.eps, self.momentum, self.sync = eps, momentum, sync
        self.register_buffer("mean", torch.zeros(num_features, device=device, dtype=wide))
        self.register_buffer("var", torch.ones(num_features, device=device, dtype=wide))
        self.register_buffer("largest_batch", torch.zeros((), device=device, dtype=wide))
        # What the weights of all batches so far add up to: 1 − (1 − momentum)^t after t full ones.
        self.register_buffer("total_weight", torch.zeros((), device=device, dtype=wide))
        self.unfold_next = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return z_norm(x, self.mean, self.var, eps=self.eps, dim=self.dim)
        wide = widen(x)
        across = self._across_processes()
        if self.has_no_spread(x):
            return z_norm(x, self.mean, self.var, eps=self.eps, dim=self.dim)
        batch = batch_statistics(wide, self.dim, across)
        if across:
            # The global count is on the device. A choice there saves a synchronisation.
            spread = torch.as_tensor(batch.number) > 1
            batch = BatchStatistics(
                torch.where(spread, batch.origin, self.mean),
                torch.where(spread, batch.offset, 0.0),
                torch.where(spread, batch.var, self.var),
                torch.where(spread, batch.number, 0.0),
            )
        if not _recomputing():
            self._store(batch)
        return standardise(wide, batch, self.eps, self.dim).to(x.dtype)

    def has_no_spread(self, x: Tensor) -> bool:
        """Tell whether features are those of one sample at most, and of no other process's either."""
        return x.numel() <= self.num_features and not self._across_processes()

    @torch.no_grad()
    def _store(self, batch: BatchStatistics) -> None:
        self.largest_batch.clamp_(min=batch.number)
        weight = self.momentum * batch.number / self.largest_batch.clamp(min=1)
        if self.momentum < 1:
            self.total_weight.add_(weight * (1 - self.total_weight))
            # An empty batch divides 0 by 0 otherwise.
            weight = weight / self.total_weight.clamp(min=torch.finfo(weight.dtype).tiny)
        self.mean.lerp_((batch.origin + batch.offset).to(self.mean.dtype), weight.to(self.mean.dtype))
        self.var.lerp_(batch.var.to(self.var.dtype), weight.to(self.var.dtype))

    def set_identity_(self) -> None:
        """Reset the stored statistics so that eval mode passes features through unchanged."""
        self.mean.zero_()
        self.var.fill_(1 - self.eps)
        self.largest_batch.zero_()
        self.total_weight.zero_()

    def unfold_(self, leaf: ZNormLeaf, x: Tensor) -> None:
        """Rewrite a classifier of raw features so that it gives the same logits over this batch's normalised ones.

        The inverse of folding, by the statistics of `x`, the first training batch. A kept head starts where it was.
        """
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            batch = batch_statistics(widen(x), self.dim, self._across_processes())
            column = (1, -1) + (1,) * (leaf.weight.ndim - 2)
            if leaf.bias is not None:
                mean = (batch.origin + batch.offset).to(leaf.weight.dtype)
                leaf.bias.add_(leaf.weight.flatten(1) @ mean)
            leaf.weight.mul_(torch.sqrt(batch.var + self.eps).view(column))
        self.unfold_next = False

    def _across_processes(self) -> bool:
        return self.sync and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZNorm:
        # model.half() and model.to(torch.bfloat16) must leave the statistics in float32.
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = getattr(self, name)
            if moved.dtype.itemsize < buffer.dtype.itemsize:
                setattr(self, name, buffer.to(moved.device))
        return self

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, sync={self.sync}"


def _recomputing() -> bool:
    """Check whether this forward repeats an earlier one during a backward, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class ZNormLeaf(nn.Module):
    """Base of the classifiers over normalised features."""

    znorm: ZNorm
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        if self.znorm.unfold_next and self.training:
            if getattr(self, "_is_replica", False):
                raise InputError(
                    "A kept head carries over to normalised features in its first training batch, and DataParallel "
                    "would lose that with its replica. Use DistributedDataParallel, or "
                    'EntameConfig(init="keep", feature_norm=False).'
                )
            self.znorm.unfold_(self, x)
        return super().forward(self.znorm(x))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # No public hook can add the buffers that a checkpoint lacks: one of stock or folded weights has no statistics.
        names = {f"{prefix}znorm.{name}" for name, _ in self.znorm.named_buffers()}
        if f"{prefix}weight" in state_dict and names.isdisjoint(state_dict):
            # This head reads raw features: the first training batch rewrites it, its mean going into the bias.
            self.znorm.set_identity_()
            self.znorm.unfold_next = self.bias is not None
            state_dict.update({f"{prefix}znorm.{name}": buffer for name, buffer in self.znorm.named_buffers()})
        elif not names.isdisjoint(state_dict):
            # The state of a kept head before its first training batch, as a search for a learning rate restores it.
            var, seen = (state_dict.get(f"{prefix}znorm.{name}") for name in ("var", "largest_batch"))
            self.znorm.unfold_next = False
            if var is not None and seen is not None and not seen.is_meta and not seen.any():
                is_identity = torch.equal(var, torch.full_like(var, 1 - self.znorm.eps))
                self.znorm.unfold_next = is_identity and self.bias is not None
        super()._load_from_state_dict(state_dict, prefix, *args)


class ZNormLinear(ZNormLeaf, nn.Linear):
    """A linear classifier over batch-normalised features.

    Args:
        in_features (`int`): K, features per example.
        out_features (`int`): C, classes.
        bias (`bool`, *optional*, defaults to `True`): whether to add a bias.
        eps (`float`, *optional*, defaults to 1e-5): added to the variance under the root.
        momentum (`float`, *optional*, defaults to 1.0): weight of a full batch in the stored statistics, in (0, 1].
        sync (`bool`, *optional*, defaults to `True`): normalise over the global batch of all processes.

    Shape: input `(N, *, K)`, output `(N, *, C)`.

    Example:

    ```python
    >>> import torch
    >>> from entame_hf import ZNormLinear

    >>> ZNormLinear(512, 10)(torch.randn(8, 512)).shape
    torch.Size([8, 10])
    ```
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        eps: float = 1e-5,
        momentum: float = 1.0,
        sync: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.znorm = ZNorm(in_features, eps=eps, momentum=momentum, sync=sync, device=device, dtype=dtype)


class ZNormConv2d(ZNormLeaf, nn.Conv2d):
    """A 1×1-convolution classifier over batch-normalised feature maps.

    Args:
        in_channels (`int`): K, features per position.
        out_channels (`int`): C, classes.
        kernel_size (`int`, *optional*, defaults to 1): 1; every other argument is as for [`torch.nn.Conv2d`].
        eps, momentum, sync: as for [`ZNormLinear`].

    Shape: input `(N, K, H, W)`, output `(N, C, H, W)`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        *,
        eps: float = 1e-5,
        momentum: float = 1.0,
        sync: bool = True,
        **conv: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, **conv)
        if self.kernel_size != (1, 1) or self.groups != 1:
            raise InputError(f"`kernel_size={kernel_size}`, `groups={self.groups}` do not fold back: use 1 and 1.")
        where = {name: conv.get(name) for name in ("device", "dtype")}
        self.znorm = ZNorm(in_channels, eps=eps, momentum=momentum, sync=sync, dim=-3, **where)


def without_statistics(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the feature statistics of heads, which stock models lack."""
    return {name: tensor for name, tensor in state_dict.items() if ".znorm." not in name}
