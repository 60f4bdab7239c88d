"""z-normalisation of a batch: the arithmetic."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class BatchStatistics(NamedTuple):
    """Statistics of one batch, per feature; the mean is `origin + offset`.

    Features far from zero keep their precision because everything is computed relative to `origin`, a row of the
    batch: a constant feature has an offset and a variance of exactly zero.
    """

    origin: Tensor
    offset: Tensor
    var: Tensor
    number: Tensor | int


def z_norm(
    x: Tensor, mean: Tensor | None = None, var: Tensor | None = None, *, eps: float = 1e-5, dim: int = -1
) -> Tensor:
    """Normalise each feature to zero mean and unit variance across the batch.

    Args:
        x (`torch.Tensor` of shape `(N, *, K)`): floating-point features; `dim` says where K is.
        mean (`torch.Tensor` of shape `(K,)`, *optional*): given statistics; the batch's own where left out.
        var (`torch.Tensor` of shape `(K,)`, *optional*): biased variance that belongs to `mean`.
        eps (`float`, *optional*, defaults to 1e-5): added to the variance under the root.
        dim (`int`, *optional*, defaults to -1): the feature dimension; statistics are taken over all others.

    Returns:
        `torch.Tensor`: shape and dtype of `x`; computed in float32, or float64 where `x` is.

    Raises:
        ValueError: one of `mean` and `var` is given without the other.

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
        raise ValueError("z_norm takes mean and var together: give both, or none to use the batch's own.")
    wide = widen(x)
    if mean is None or var is None:
        return standardise(wide, batch_statistics(wide, dim, sync=False), eps, dim).to(x.dtype)
    zero = torch.zeros_like(mean)
    return standardise(wide, BatchStatistics(mean, zero, var, 0), eps, dim).to(x.dtype)


def widen(x: Tensor) -> Tensor:
    """Convert to the dtype that statistics are computed in: float32, or float64 where `x` is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _along(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """View K values so that they broadcast along dimension `dim` of `x`."""
    shape = [1] * x.ndim
    shape[dim] = -1
    return values.view(shape)


def standardise(x: Tensor, batch: BatchStatistics, eps: float, dim: int) -> Tensor:
    """Normalise features with the statistics of a batch."""
    # Subtracting in two steps: origin + offset would round, and 1/sqrt(eps) magnifies what is rounded off.
    centred = (x - _along(batch.origin, x, dim)) - _along(batch.offset, x, dim)
    return centred * torch.rsqrt(_along(batch.var, x, dim) + eps)


def batch_statistics(x: Tensor, dim: int, sync: bool) -> BatchStatistics:
    """Compute the statistics of a batch, over all processes where `sync` says so."""
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    count = rows.shape[0]
    origin = rows[0].detach() if count else rows.new_zeros(rows.shape[1])
    shifted = rows - origin
    offset = shifted.sum(0) / max(count, 1)
    squares = (shifted - offset).square().sum(0)
    if not sync:
        return BatchStatistics(origin, offset, squares / max(count, 1), count)
    return _over_processes(origin, offset, squares, count)


def _over_processes(origin: Tensor, offset: Tensor, squares: Tensor, count: int) -> BatchStatistics:
    """Combine every process's statistics into those of the global batch, with gradients.

    One all-reduce forward and one backward: each process fills its own row of a table that is zero elsewhere.
    """
    mine = torch.cat([offset, squares, origin, origin.new_full((1,), count)])
    rows = [mine if rank == dist.get_rank() else torch.zeros_like(mine) for rank in range(dist.get_world_size())]
    table = _SumOverProcesses.apply(torch.stack(rows))
    width = origin.numel()
    offsets, squares_, origins, counts = table.split([width, width, width, 1], dim=1)
    counts = counts.detach()
    total = counts.sum()
    share = counts / total.clamp(min=1)
    # A process without samples has no row to offer as the common origin: take the largest batch's. Not by indexing,
    # for which the host would wait until the device knows which it is.
    common = origins.detach().index_select(0, counts.argmax(0)).squeeze(0)
    means = offsets + (origins.detach() - common)
    offset = (share * means).sum(0)
    spread = squares_ + counts * (means - offset).square()
    return BatchStatistics(common, offset, spread.sum(0) / total.clamp(min=1), total)


class _SumOverProcesses(torch.autograd.Function):
    """Sum over all processes, whose gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _SumOverProcesses.apply(gradient)
