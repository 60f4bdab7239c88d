"""z-normalisation of a batch: the arithmetic."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# torch calls it so since 2.14, and warns of its former name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
    if sync:
        origin, offset, var, number = _GlobalStatistics.apply(rows)
        # Here: torch.compile stumbles over mark_non_differentiable before torch 2.14.
        return BatchStatistics(origin.detach(), offset, var, number.detach())
    count = rows.shape[0]
    origin, offset, squares = _moments(rows)
    return BatchStatistics(origin, offset, squares / max(count, 1), count)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the first row, the mean relative to it, and the sum of squares around the mean."""
    origin = rows[0].detach() if len(rows) else rows.new_zeros(rows.shape[1])
    shifted = rows - origin
    offset = shifted.sum(0) / max(len(rows), 1)
    return origin, offset, (shifted - offset).square().sum(0)


class _GlobalStatistics(torch.autograd.Function):
    """Give `origin`, `offset`, `var` and `number` of the batch that is spread over all processes.

    Forward, 3K + 1 numbers of each process are gathered; backward, 2K are summed. A gradient that is written out
    launches fewer kernels than those of all the operations that statistics are combined by.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        width = rows.shape[1]
        mine = torch.cat([*_moments(rows), rows.new_full((1,), len(rows))])
        table = mine.new_empty(dist.get_world_size() * len(mine))
        _all_gather(table, mine)
        origins, offsets, squares, counts = table.view(-1, len(mine)).split([width, width, width, 1], dim=1)
        total = counts.sum()
        divisor = total.clamp(min=1)
        # A process without samples has no row to offer as the common origin: take the largest batch's. Not by
        # indexing, for which the host would wait until the device knows which it is.
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
        # Each process's outputs depend on the statistics, and these on each process's rows.
        gradients = torch.cat([to_offset, to_var])
        dist.all_reduce(gradients)
        to_offset, to_var = (gradients / divisor).chunk(2)
        return torch.addcmul(to_offset, to_var, (rows - origin) - offset, value=2)
