"""Tell how well a model's features fit classes, before any training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..heads import find_heads
from .features import HeadFeatures, collect_features, per_process
from .ridge import LeastSquares, fit_ridge, is_first, send_from_first

# Iterations of LogME's fixed point at most.
MOST_STEPS = 100


@dataclass(frozen=True)
class Probe:
    """Say how well a model's features fit classes.

    Args:
        accuracy (`float`): leave-one-out accuracy of a linear probe, in [0, 1].
        logme (`float`): see [`log_evidence`].
        samples (`int`): images.
    """

    accuracy: float
    logme: float
    samples: int

    def __str__(self) -> str:
        return (
            f"Before any training: {self.accuracy:.1%} expected on unseen images, by leaving one out of "
            f"{self.samples:,} (LogME {self.logme:.3f})."
        )


def probe_features(model: nn.Module, batches: Iterable[Any], *, num_classes: int, max_samples: int = 50_000) -> Probe:
    """Measure how well the features of a pretrained model fit classes, in one pass in eval mode.

    The model stays as it is; its own head may be one for other classes. In several processes, each gives its batches.

    Args:
        model (`torch.nn.Module`): see [`find_heads`]; the first head's features count.
        batches (iterable): as for [`fit_head`].
        num_classes (`int`): C, the classes of the labels.
        max_samples (`int`, *optional*, defaults to 50,000): images to look at, over all processes.

    Returns:
        [`Probe`]

    Raises:
        InputError: there is no head or no labelled image, or a label is none of the classes.
    """
    (features,) = collect_features(model, find_heads(model)[:1], batches, per_process(max_samples), num_classes)
    mean, var = features.statistics()
    std = torch.sqrt(var + 1e-5)
    if not std.isfinite().all() or LeastSquares(features, num_classes, mean, std, None).total == 0:
        raise InputError("There is no labelled image to probe: give batches of images and labels.")
    ridge = fit_ridge(features, num_classes, mean, std)
    return Probe(ridge.accuracy, log_evidence(features, num_classes), ridge.samples)


@torch.no_grad()
def log_evidence(features: HeadFeatures, num_classes: int) -> float:
    """Compute LogME: the largest log evidence of a Bayesian linear model, per image, averaged over classes.

    For each class, y ~ N(Fw, 1/β) with w ~ N(0, 1/α), F the features as they are and y one-hot; α and β maximise the
    evidence by MacKay's fixed point.

    Args:
        features ([`HeadFeatures`]): this process's; the sums are over all.
        num_classes (`int`): C; classes without an image are left out.

    Returns:
        `float`: higher is better; comparable between models on the same images.

    Source: [LogME](https://arxiv.org/abs/2102.11005), You et al., 2021.
    """
    zero = torch.zeros_like(features.mean)
    problem = LeastSquares(features, num_classes, zero, torch.ones_like(zero), None)
    gram, sums = problem.moments()
    result = torch.zeros((), dtype=torch.float64, device=gram.device)
    if is_first():
        values, vectors = torch.linalg.eigh(gram)
        known = problem.masses > 0
        result.fill_(_evidence(values.clamp_(min=0), (sums @ vectors)[known].square(), problem.masses[known]))
    send_from_first(result)
    return float(result) / problem.total


def _evidence(values: Tensor, squares: Tensor, targets: Tensor) -> Tensor:
    """Maximise the log evidence of each class, and average it.

    `values` (K,) are the eigenvalues of FᵀF, `squares` (C, K) those of Fᵀy along the eigenvectors, `targets` (C,)
    ‖y‖².
    """
    ratio = torch.ones_like(targets)
    count = targets.sum()
    for _ in range(MOST_STEPS):
        shrunk = values + ratio[:, None]
        freedom = (values / shrunk).sum(1)
        size = (squares / shrunk.square()).sum(1).clamp(min=1e-300)
        error = (targets - (squares * (shrunk + ratio[:, None]) / shrunk.square()).sum(1)).clamp(min=1e-12)
        alpha, beta = freedom / size, (count - freedom).clamp(min=1e-12) / error
        before, ratio = ratio, (alpha / beta).clamp(1e-12, 1e12)
        if bool(((ratio - before).abs() <= 1e-6 * before).all()):
            break
    shrunk = values + ratio[:, None]
    size = (squares / shrunk.square()).sum(1)
    error = targets - (squares * (shrunk + ratio[:, None]) / shrunk.square()).sum(1)
    # Of alpha + beta · values, without the ratio's rounding: beta · shrunk.
    logs = torch.log(beta[:, None] * shrunk).sum(1)
    evidence = len(values) * alpha.log() + count * (beta.log() - math.log(2 * math.pi)) - logs
    return (0.5 * (evidence - beta * error - beta * ratio * size)).mean()
