"""Measure the energy of the error at a classifier's logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ..errors import InputError
from ..patch import class_indices


class ErrorEnergy(NamedTuple):
    """Energy of the error at the logits and its parts, per example and averaged; each a float32 scalar tensor.

    Args:
        estimates (`torch.Tensor`): E[ŷŷᵀ], in [1/C, 1].
        labels (`torch.Tensor`): E[yyᵀ], 1 for one-hot labels.
        alignment (`torch.Tensor`): E[ŷyᵀ], in [0, 1].
        total (`torch.Tensor`): φ = estimates + labels − 2·alignment = E‖ŷ − y‖², in [0, 2].
        noise_share (`torch.Tensor`): estimates / total; 1/(C − 1) for a head at maximum entropy.
        entropy (`torch.Tensor`): mean entropy of the estimates, in nats; at most ln C.
    """

    estimates: Tensor
    labels: Tensor
    alignment: Tensor
    total: Tensor
    noise_share: Tensor
    entropy: Tensor


def fraction_of_error(part: Tensor, total: Tensor) -> Tensor:
    """Divide a part's energy by the error's; 0 where the error is 0."""
    return torch.where(total == 0, torch.zeros_like(total), part / total)


@torch.no_grad()
def error_energy(logits: Tensor, labels: Tensor) -> ErrorEnergy:
    """Measure the energy of the error at the logits of a softmax classifier trained with cross-entropy.

    Args:
        logits (`torch.Tensor` of shape `(N, C)`): floating-point scores, before softmax.
        labels (`torch.Tensor` of shape `(N,)` or `(N, C)`):
            Class indices, negative where an example is to be ignored, or one row of probabilities an example (soft
            labels, mixup).

    Returns:
        [`ErrorEnergy`]: computed in float32, on the device of `logits`.

    Raises:
        InputError: the shapes do not fit, or a label is none of the classes.

    Example:

    ```python
    >>> import torch
    >>> from entame_hf import error_energy

    >>> float(error_energy(torch.zeros(4, 10), torch.tensor([0, 1, 2, 3])).noise_share)  # 1 / (10 - 1)
    0.1111111119389534
    ```

    Source: equations 13 and 14 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """
    if logits.ndim != 2 or labels.shape not in (logits.shape[:1], logits.shape):
        raise InputError(
            f"error_energy takes logits of shape (N, C) and labels of shape (N,) or (N, C), "
            f"not {tuple(logits.shape)} and {tuple(labels.shape)}."
        )
    if labels.ndim == 1:
        labels = class_indices(labels, logits.shape[-1])
        logits, labels = logits[labels >= 0], labels[labels >= 0]
    return measured(logits, labels)


def measured(logits: Tensor, labels: Tensor) -> ErrorEnergy:
    """Measure the energy of an error; no label is ignored or out of range."""
    log_estimates = logits.float().log_softmax(dim=-1)
    estimates = log_estimates.exp()
    targets = one_hot(labels, logits.shape[-1]).float() if labels.ndim == 1 else labels.float()

    def mean_energy(left: Tensor, right: Tensor) -> Tensor:
        return (left * right).sum(dim=-1).mean()

    of_estimates = mean_energy(estimates, estimates)
    total = (estimates - targets).square().sum(dim=-1).mean()
    return ErrorEnergy(
        estimates=of_estimates,
        labels=mean_energy(targets, targets),
        alignment=mean_energy(estimates, targets),
        total=total,
        noise_share=fraction_of_error(of_estimates, total),
        # softmax underflows to 0 where its logarithm is still finite, and 0 · ln 0 = 0.
        entropy=-mean_energy(estimates, log_estimates.clamp(min=torch.finfo(torch.float32).min)),
    )
