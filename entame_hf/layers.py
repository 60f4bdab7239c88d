"""Classifiers that z-normalise their input across the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .znorm import BatchStatistics, batch_statistics, standardise, widen, z_norm


class ZNorm(nn.Module):
    """Normalise features with the batch's statistics in training and with the stored ones in evaluation.

    Args:
        num_features (`int`): K.
        eps (`float`, *optional*, defaults to 1e-5): added to the variance under the root.
        momentum (`float`, *optional*, defaults to 1.0):
            A batch of n samples moves the stored statistics by `momentum * n / largest_batch`: a full batch replaces
            them, a left-over partial batch barely moves them.
        sync (`bool`, *optional*, defaults to `True`): take the statistics over all processes of a distributed run.
        dim (`int`, *optional*, defaults to -1): the feature dimension of the input.

    Shape: input and output `(N, *, K)`, or K at `dim`.

    Source: equation 19 of [ENTAME](https://arxiv.org/abs/1905.10698); like batch normalisation without parameters.
    """

    mean: Tensor
    var: Tensor
    largest_batch: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        momentum: float = 1.0,
        sync: bool = True,
        dim: int = -1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.sync, self.dim = (
            num_features,
            eps,
            momentum,
            sync,
            dim,
        )
        self.register_buffer("mean", torch.zeros(num_features, device=device))
        self.register_buffer("var", torch.ones(num_features, device=device))
        self.register_buffer("largest_batch", torch.zeros((), device=device))
        self.unfold_next = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return z_norm(x, self.mean, self.var, eps=self.eps, dim=self.dim)
        wide = widen(x)
        across = self._across_processes()
        if not across and x.numel() <= self.num_features:
            # One sample has no spread.
            return z_norm(x, self.mean, self.var, eps=self.eps, dim=self.dim)
        batch = batch_statistics(wide, self.dim, across)
        if across:
            # The global count lives on the device: choosing there spares a synchronisation.
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

    @torch.no_grad()
    def _store(self, batch: BatchStatistics) -> None:
        self.largest_batch.clamp_(min=batch.number)
        weight = self.momentum * batch.number / self.largest_batch.clamp(min=1)
        self.mean.lerp_((batch.origin + batch.offset).to(self.mean.dtype), weight.to(self.mean.dtype))
        self.var.lerp_(batch.var.to(self.var.dtype), weight.to(self.var.dtype))

    def set_identity_(self) -> None:
        """Reset the stored statistics so that evaluation passes features through unchanged."""
        self.mean.zero_()
        self.var.fill_(1 - self.eps)
        self.largest_batch.zero_()

    def unfold_(self, leaf: ZNormLeaf, x: Tensor) -> None:
        """Rewrite a classifier of raw features so that it gives the same logits over this batch's normalised ones.

        The inverse of folding, with the statistics of `x`, the first training batch: an adapted head goes on from
        where it was.
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
        # model.half() and model.to(torch.bfloat16) must not round the statistics.
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
    """Tell whether this forward repeats an earlier one within a backward, as activation checkpointing does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class ZNormLeaf(nn.Module):
    """What the classifiers over normalised features have in common."""

    znorm: ZNorm
    weight: Any
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        if self.znorm.unfold_next and self.training:
            self.znorm.unfold_(self, x)
        return super().forward(self.znorm(x))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A stock or folded checkpoint has a head without statistics. That head reads raw features.
        names = {f"{prefix}znorm.{name}" for name, _ in self.znorm.named_buffers()}
        if f"{prefix}weight" in state_dict and names.isdisjoint(state_dict):
            self.znorm.set_identity_()
            state_dict.update({f"{prefix}znorm.{name}": buffer for name, buffer in self.znorm.named_buffers()})
        elif not names.isdisjoint(state_dict):
            # The head that comes is one over normalised features already.
            self.znorm.unfold_next = False
        super()._load_from_state_dict(state_dict, prefix, *args)


class ZNormLinear(ZNormLeaf, nn.Linear):
    """A linear classifier over batch-normalised features.

    Args:
        in_features (`int`): K, features per example.
        out_features (`int`): C, classes.
        bias (`bool`, *optional*, defaults to `True`): whether to add a bias.
        eps (`float`, *optional*, defaults to 1e-5): see [`ZNorm`].
        momentum (`float`, *optional*, defaults to 1.0): see [`ZNorm`].
        sync (`bool`, *optional*, defaults to `True`): see [`ZNorm`].

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
        self.znorm = ZNorm(in_features, eps=eps, momentum=momentum, sync=sync, device=device)


class ZNormConv2d(ZNormLeaf, nn.Conv2d):
    """A 1×1-convolution classifier over batch-normalised feature maps.

    Args:
        in_channels (`int`): K, features per position.
        out_channels (`int`): C, classes.
        kernel_size (`int`, *optional*, defaults to 1): as [`torch.nn.Conv2d`], like every other argument of it.
        eps (`float`, *optional*, defaults to 1e-5): see [`ZNorm`].
        momentum (`float`, *optional*, defaults to 1.0): see [`ZNorm`].
        sync (`bool`, *optional*, defaults to `True`): see [`ZNorm`].

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
        self.znorm = ZNorm(in_channels, eps=eps, momentum=momentum, sync=sync, dim=-3, device=conv.get("device"))
