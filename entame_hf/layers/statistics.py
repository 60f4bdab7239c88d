"""z-normalisation across a batch: the function, and the statistics of one process or of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError

# The name since torch 2.14, which deprecates the former one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def z_norm(
    x: Tensor, mean: Tensor | None = None, var: Tensor | None = None, *, eps: float = 1e-5, dim: int = -1
) -> Tensor:
    """Normalise each feature to zero mean and unit variance across the batch.

    Args:
        x (`torch.Tensor` of shape `(N, *, K)`): floating-point features, with K at `dim`.
        mean (`torch.Tensor` of shape `(K,)`, *optional*): defaults to the batch's mean.
        var (`torch.Tensor` of shape `(K,)`, *optional*): biased variance; defaults to the batch's.
        eps (`float`, *optional*, defaults to 1e-5): added to the variance under the root.
        dim (`int`, *optional*, defaults to -1): the feature dimension; statistics are taken over all others.

    Returns:
        `torch.Tensor`: shape and dtype of `x`; computed in float32, or float64 where `x` is.

    Raises:
        InputError: one of `mean` and `var` is set without the other.

    Example:

    ```python
    >>> import torch
    >>> from entame_hf import z_norm

    >>> z_norm(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    tensor([[-1.0000,  0.0000],
            [ 1.0000,  0.0000]])
    ```

    Source: equation 19 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """
    if (mean is None) != (var is None):
        set_one, other = ("var", "mean") if mean is None else ("mean", "var")
        raise InputError(
            f"z_norm got `{set_one}` without `{other}`: pass both, or neither to use the batch's own statistics."
        )
    wide = widen(x)
    if mean is None or var is None:
        return standardise(wide, batch_statistics(wide, dim, sync=False), eps, dim).to(x.dtype)
    zero = torch.zeros_like(mean)
    return standardise(wide, BatchStatistics(mean, zero, var, 0), eps, dim).to(x.dtype)


class BatchStatistics(NamedTuple):
    """Statistics of one batch, per feature; the mean is `origin + offset`, and `origin` a row of the batch.

    So features far from zero keep their precision, and a constant one has a variance of exactly zero.
    """

    origin: Tensor
    offset: Tensor
    var: Tensor
    number: Tensor | int


def widen(x: Tensor) -> Tensor:
    """Convert to the dtype that statistics are computed in: float32, or float64 where `x` is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def standardise(x: Tensor, batch: BatchStatistics, eps: float, dim: int) -> Tensor:
    """Normalise features with the statistics of a batch."""
    shape = [1] * x.ndim
    shape[dim] = -1
    origin, offset, var = (values.view(shape) for values in (batch.origin, batch.offset, batch.var))
    # Subtracting in two steps: origin + offset would round, and 1/sqrt(eps) magnifies what is rounded off.
    return (x - origin - offset) * torch.rsqrt(var + eps)


def batch_statistics(x: Tensor, dim: int, sync: bool) -> BatchStatistics:
    """Compute the statistics of a batch, with `sync` of the global batch of all processes."""
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    if sync:
        origin, offset, var, number = _GlobalStatistics.apply(rows)
        # Detached here: torch.compile fails on mark_non_differentiable before torch 2.14.
        return BatchStatistics(origin.detach(), offset, var, number.detach())
    count = rows.shape[0]
    origin, offset, squares = _moments(rows)
    return BatchStatistics(origin, offset, squares / max(count, 1), count)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the first row, the mean relative to it, and the sum of squared deviations from the mean."""
    origin = rows[0].detach() if len(rows) else rows.new_zeros(rows.shape[1])
    shifted = rows - origin
    offset = shifted.sum(0) / max(len(rows), 1)
    return origin, offset, (shifted - offset).square().sum(0)


def moments(x: Tensor, dim: int) -> Tensor:
    """Compute the count, the mean and the sum of squared deviations of each feature, over all other dimensions."""
    origin, offset, squares = _moments(x.movedim(dim, -1).reshape(-1, x.shape[dim]))
    return torch.stack([torch.full_like(squares, x.numel() // x.shape[dim]), origin + offset, squares])


def merge(parts: Tensor) -> Tensor:
    """Combine the [`moments`] (P, 3, K) of P parts of a batch, as (3, K) of all together.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    counts, means, squares = parts.unbind(1)
    count = counts.sum(0)
    # From the largest part's mean: a constant feature keeps a variance of exactly zero.
    origin = means.gather(0, counts.argmax(0, keepdim=True))
    mean = origin[0] + (counts * (means - origin)).sum(0) / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum(0)])


class _GlobalStatistics(torch.autograd.Function):
    """Compute `origin`, `offset`, `var` and `number` of the global batch, with fewer kernels than autograd would."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width = rows.shape[1]
        mine = torch.cat([*_moments(rows), rows.new_full((1,), len(rows))])
        table = mine.new_empty(dist.get_world_size() * len(mine))
        _all_gather(table, mine)
        origins, offsets, squares, counts = table.view(-1, len(mine)).split([width, width, width, 1], dim=1)
        total = counts.sum()
        divisor = total.clamp(min=1)
        # The largest batch has a row to be the common origin. index_select, as indexing synchronises with the host.
        origin = origins.index_select(0, counts.argmax(0)).squeeze(0)
        means = offsets + (origins - origin)
        offset = (counts * means).sum(0) / divisor
        var = torch.addcmul(squares, counts, (means - offset).square()).sum(0) / divisor
        ctx.save_for_backward(rows, origin, offset, divisor)
        return origin, offset, var, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, to_offset: Tensor, to_var: Tensor, __: Any) -> Tensor:
        rows, origin, offset, divisor = ctx.saved_tensors
        # Every process's outputs depend on every process's rows, through the statistics.
        gradients = torch.cat([to_offset, to_var])
        dist.all_reduce(gradients)
        to_offset, to_var = (gradients / divisor).chunk(2)
        return torch.addcmul(to_offset, to_var, (rows - origin) - offset, value=2)
