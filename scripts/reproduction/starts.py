"""Heads that peers fit before training: LP-FT's converged probe, and ridge regression at the temperature that fits."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import exp
from typing import Any

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from entame_hf.patch import HeadFeatures, collect_head_features, fit_ridge, log_evidence
from entame_hf.trainer import training_batches

# L2 penalties of the probe, from the largest on: each fit starts from the one before.
PENALTIES = tuple(10.0**exponent for exponent in range(0, -7, -1))


class FittedStart(TrainerCallback):
    """Make one pass over the training images, and fit the head to what it reads; log LogME of an informed head's.

    Args:
        trainer (`RunTrainer`): Its `args.head_start` says how the head is fitted.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        trainer, start = self.trainer, self.trainer.args.head_start
        informed = trainer.entame_config().init == "ridge"
        if not informed and start is None:
            return
        (head,) = trainer.heads()
        if start == "logistic" and trainer.source in _probes:
            return write_probe(head.module, _probes[trainer.source])
        count, classes = trainer.args.informed_samples, head.module.weight.shape[0]
        batches = training_batches(trainer, count, "Fitting the head")
        with trainer.accelerator.autocast(), closing(batches):
            (features,) = collect_head_features(trainer.model, [head], batches, count)
        if start == "logistic":
            _probes[trainer.source] = fit_logistic(features, classes)
            write_probe(head.module, _probes[trainer.source])
        elif start == "temperature":
            fit_temperature(head.module, features)
        if informed:
            trainer.log({"logme": log_evidence(features, classes)})


# A converged probe depends on neither learning rate nor seed: a process fits one for each model and dataset.
_probes: dict[Any, Tensor] = {}


def fit_logistic(features: HeadFeatures, classes: int) -> Tensor:
    """Train a linear probe of raw features to convergence, and return its weights and biases, (C, K + 1).

    A fifth of the images chooses the L2 penalty by its cross-entropy. Then the probe is fitted to all of them. All of
    it runs on the CPU: L-BFGS reads a number after each small step, for which a shared GPU is slow.
    """
    mean, var = (values.cpu() for values in features.statistics())
    std = torch.sqrt(var + 1e-5)
    rows, labels = (features.rows.cpu() - mean) / std, features.labels.cpu()
    rows, mean, std = rows.float(), mean.float(), std.float()
    fitted, held = _split(len(rows), rows.device)
    losses: dict[float, float] = {}
    probe = rows.new_zeros(classes, rows.shape[1] + 1)
    for penalty in PENALTIES:
        probe = converge(probe, rows[fitted], labels[fitted], penalty)
        losses[penalty] = float(cross_entropy(_logits(probe, rows[held]), labels[held]))
    best = min(PENALTIES, key=lambda penalty: losses[penalty])
    probe = converge(probe, rows, labels, best)
    weight = probe[:, :-1] / std
    return torch.cat([weight, (probe[:, -1] - weight @ mean)[:, None]], 1)


@torch.no_grad()
def write_probe(leaf: nn.Linear, probe: Tensor) -> None:
    """Set a classifier of raw features to a probe's weights and biases, (C, K + 1)."""
    leaf.weight.copy_(probe[:, :-1])
    leaf.bias.copy_(probe[:, -1])


def converge(probe: Tensor, rows: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Minimise cross-entropy plus penalty / 2 · ‖W‖², starting from a (C, K + 1) probe, weights and bias."""
    probe = probe.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([probe], max_iter=300, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(_logits(probe, rows), labels) + penalty / 2 * probe[:, :-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return probe.detach()


def fit_temperature(leaf: Any, features: HeadFeatures) -> float:
    """Scale a ridge head so that its cross-entropy on unseen images is least; return the factor.

    The factor is the best one for a fifth of the images and a ridge head that was fitted to the others.
    """
    mean, var = features.statistics()
    std = torch.sqrt(var + leaf.znorm.eps)
    fitted, held = _split(len(features.rows), features.rows.device)
    part = replace(features, rows=features.rows[fitted], labels=features.labels[fitted])
    ridge = fit_ridge(part, leaf.weight.shape[0], mean, std)
    logits, labels = (features.rows[held] - mean) / std @ ridge.weight.mT, features.labels[held]
    found = minimize_scalar(lambda log: float(cross_entropy(logits * exp(log), labels)), bounds=(-3, 7))
    with torch.no_grad():
        leaf.weight.mul_(exp(found.x))
    return exp(found.x)


def _split(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)
    return order[count // 5 :], order[: count // 5]


def _logits(probe: Tensor, rows: Tensor) -> Tensor:
    return rows @ probe[:, :-1].mT + probe[:, -1]
