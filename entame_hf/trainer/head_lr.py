"""The head learning rate, given or measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerState
from transformers.utils import logging

from ..errors import InputError
from ..heads import Head
from ..layers import ZNormLeaf, widen
from ..training_args import AUTO
from .checkpoint import saved_record

logger = logging.get_logger(__name__)

# δ, how far a step may move a logit: of those that scripts/suites/head_rate.yaml compares, on parts of training data
# that were set aside, the one that costs least against the best rate of each setting.
LOGIT_STEP = 0.5

KEY = "head_lr"

# In a parameter group: the path of the head that it belongs to. Checkpoints keep it.
MARK = "head"


def feature_norms(features: Tensor, dim: int = -1) -> Tensor:
    """Compute ‖x‖₁ of each example, averaged over its positions, in float32 or wider; features are along `dim`."""
    norms = torch.linalg.vector_norm(widen(features), 1, dim)
    return norms.flatten(1).mean(1) if norms.ndim > 1 else norms


def head_learning_rate(features: Tensor, dim: int = -1) -> float:
    """Compute the learning rate of a head for Adam: δ / E‖x‖₁, with which a step moves its logits by about δ at most.

    For a training loop of your own; [`EntameTrainer`] measures by itself, with `head_lr="auto"`.

    Args:
        features (`torch.Tensor` of shape `(N, *, K)`):
            What the classifier multiplies in the first batch: after normalisation, where its features are normalised.
        dim (`int`, *optional*, defaults to -1): the feature dimension.

    Returns:
        `float`: the rate for the head's parameter group, with δ = 0.5.

    Raises:
        InputError: the features are all zero, not finite, or none.

    Example:

    ```python
    >>> import torch
    >>> from entame_hf import head_learning_rate

    >>> head_learning_rate(torch.ones(8, 500))
    0.001
    ```
    """
    return LOGIT_STEP / _positive(float(feature_norms(features, dim).mean()), "the classifier")


def _positive(reach: float, path: str) -> float:
    if not 0 < reach < math.inf:
        raise InputError(
            f"What {path} reads in the first step is zero or not finite ({reach}): no learning rate follows. Look at "
            "the images and the model's weights; or give the rate, such as `head_lr=1e-3`."
        )
    return reach


class HeadRates(TrainerCallback):
    """Give each head a parameter group, and measure its learning rate unless it is given.

    With `head_lr="auto"`, the rate is δ over how far a step at the rate 1 moves a logit of an example x, on average. A
    step that changes a class's weights by D changes its logit by Dx:

    | optimizer | D | rate |
    |---|---|---|
    | Adam and its kin | about ±1 each, whatever the gradient's size, so that abs(Dx) ≤ ‖x‖₁ | δ / E‖x‖₁ |
    | `torch.optim.SGD` | G / (1 − momentum), G being the gradient | δ (1 − momentum) / E abs(Gx) |

    Adam's steps are as large whatever the gradient, which is why theirs is a bound. SGD's follow it, so that its own
    reach is what counts, times what momentum makes of a gradient that stays.

    Measured is the first optimizer step, over all its micro-batches and processes, before it is taken; G before it is
    clipped, and over all classes. A step that fp16's scaler skips leaves it to the next. The rate is the peak of the
    schedule that all groups share. The log keeps it, once, as `head_lr`, and a run that is resumed takes it from
    there. Models with several heads have several rates (`head_lr/...`), because what their heads read differs in width
    and size; a head that the first step does not use stays at the base rate. A step that is measured runs uncompiled.

    Args:
        trainer ([`EntameTrainer`]): the trainer whose heads these are; callbacks are not told.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # What SGD's steps come to of a gradient that stays; None for Adam and its kin.
        self._share: float | None = None
        # Of each head, what it has read in the micro-batches of a step of SGD: their gradient comes afterwards.
        self._read_before: dict[int, list[Tensor]] = {}
        # Of each head: how far a step reaches, summed over examples, and their number; None where rates are known.
        self._sums: Tensor | None = None

    def check_resuming(self, folder: str) -> None:
        """Check that a checkpoint's optimizer has groups of the heads if this run's has."""
        record, peak = saved_record(folder), self.trainer.head_args.peak_head_lr(self.trainer.args.learning_rate)
        if record and self.trainer.optimizer is None and (record.get("head_lr") is None) != (peak is None):
            there, here = ("no", "one") if peak is not None else ("a", "none")
            raise InputError(
                f"In {folder}, the heads had {there} learning rate of their own, and have {here} in this run. Resume "
                "with the same `head_lr` and `head_lr_multiplier`, or start a new run from it."
            )

    def assign(self, optimizer: Optimizer | AcceleratedOptimizer, ours: bool) -> None:
        """Assign groups and learning rates to the heads before a scheduler reads them.

        `ours` says whether the optimizer is new, and not the user's; that of an earlier try has the groups already.

        Raises:
            InputError: the rate is to be measured, and nothing is known of the optimizer's steps.
        """
        own, base_rate = self.trainer.head_args, self.trainer.args.learning_rate
        peak = own.peak_head_lr(base_rate)
        self._sums = None
        # A step that was cut off has left some.
        self._read_before.clear()
        if peak is None:
            return
        heads = self.trainer.heads()
        if ours:
            _split_groups(optimizer, heads)
        groups = [group for group in optimizer.param_groups if MARK in group]
        if not groups:
            name = "head_lr" if own.head_lr_multiplier is None else "head_lr_multiplier"
            why = "holds no head" if ours else "was built by you"
            logger.warning(f"{name} is ignored: the optimizer {why}. Set the heads' rate in it.")
            return
        known = dict.fromkeys((group[MARK] for group in groups), peak)
        if peak == AUTO:
            known = _logged(self.trainer.state.log_history, heads)
        if not known:
            self._share = _share_of_gradient(optimizer)
            self._sums = torch.zeros(2, len(heads), device=self.trainer.args.device)
        for group in groups:
            group["lr"] = group["initial_lr"] = known.get(group[MARK], base_rate)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure what the heads multiply in the training forwards of this context."""
        if self._sums is None or not self.trainer.model.training:
            yield
            return
        with torch.compiler.set_stance("force_eager"), ExitStack() as stack:
            for index, head in enumerate(self.trainer.heads()):
                stack.callback(self._watch(index, head.module).remove)
            yield

    def _watch(self, index: int, leaf: Any) -> RemovableHandle:
        if isinstance(leaf, ZNormLeaf):
            return leaf.znorm.register_forward_hook(lambda _, args, output: self._read(index, leaf, output))
        return leaf.register_forward_pre_hook(lambda _, args: self._read(index, leaf, args[0]))

    @torch.no_grad()
    def _read(self, index: int, leaf: Any, features: Tensor) -> None:
        dim = -1 if isinstance(leaf, nn.Linear) else -3
        if self._share is None:
            self._add(index, feature_norms(features, dim=dim))
        else:
            self._read_before.setdefault(index, []).append(features.movedim(dim, -1))

    def _add(self, index: int, reach: Tensor) -> None:
        assert self._sums is not None
        self._sums[0, index] += reach.sum()
        self._sums[1, index] += len(reach)

    @torch.no_grad()
    def observe_gradients(self) -> None:
        """Measure how far SGD's step moves the logits, from the gradients before clipping."""
        if self._sums is None or self._share is None:
            return
        scaler = self.trainer.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        for index, head in enumerate(self.trainer.heads()):
            gradient = head.module.weight.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            for features in self._read_before.pop(index, []):
                if gradient is not None:
                    moves = widen(features) @ widen(gradient).flatten(1).mT * (self._share / scale)
                    self._add(index, feature_norms(moves) / moves.shape[-1])

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._sums is None:
            return
        totals, counts = self.trainer.accelerator.gather(self._sums[None]).sum(0).tolist()
        if self.trainer.accelerator.scaler is not None and not all(map(math.isfinite, totals)):
            self._sums.zero_()
            return
        self._sums = None
        keys = _log_keys(self.trainer.heads())
        reach = {path: totals[i] / counts[i] for i, path in enumerate(keys) if counts[i]}
        if not reach:
            raise InputError(
                "`head_lr=auto` has seen no head at work in the first step. A method of your own has to call "
                "super().compute_loss or super().training_step; or give the rate, such as `head_lr=1e-3`."
            )
        peaks = {path: LOGIT_STEP / _positive(value, path) for path, value in reach.items()}
        _set_peaks(self.trainer.optimizer, self.trainer.lr_scheduler, peaks)
        self.trainer.log({keys[path]: peak for path, peak in peaks.items()})

    def record(self) -> dict[str, Any] | None:
        """Describe, for config and card, what was asked for and the heads' peak rates; None while they have none."""
        groups = [] if self.trainer.optimizer is None else self.trainer.optimizer.param_groups
        # The optimizer's: a checkpoint that was resumed brought them along.
        peaks = {group[MARK]: group["initial_lr"] for group in groups if MARK in group}
        return (
            {"asked": self.trainer.head_args.resolve("head_lr"), "peak": peaks}
            if peaks and self._sums is None
            else None
        )


def _split_groups(optimizer: Any, heads: list[Head]) -> None:
    for head in heads:
        parameters = {id(parameter) for parameter in head.module.parameters()}
        for group in [group for group in optimizer.param_groups if MARK not in group]:
            own = [p for p in group["params"] if id(p) in parameters]
            if own:
                group["params"] = [p for p in group["params"] if id(p) not in parameters]
                optimizer.add_param_group({**group, "params": own, MARK: head.path})


def _share_of_gradient(optimizer: Any) -> float | None:
    """Return how many times a constant gradient SGD's steps add up to; None for Adam and its kin."""
    inner = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    if isinstance(inner, SGD):
        momentum, dampening = (float(inner.defaults[name]) for name in ("momentum", "dampening"))
        if momentum >= 1:
            raise InputError(
                f"`head_lr=auto` knows no rate for momentum={momentum:g}, with which steps grow for ever. Give less, "
                "such as 0.9, or the rate, such as `head_lr=1e-3`."
            )
        # torch does not dampen the first step.
        return max(1.0, (1.0 - dampening) / (1.0 - momentum))
    if "betas" in inner.defaults:
        return None
    raise InputError(
        f"`head_lr=auto` knows how far steps of Adam and its kin and of SGD move a logit, and not those of "
        f"{type(inner).__name__}. Give the rate, such as `head_lr=1e-3`, or train with `optim=adamw_torch`."
    )


def _log_keys(heads: list[Head]) -> dict[str, str]:
    return {head.path: KEY if len(heads) == 1 else f"{KEY}/{head.path}" for head in heads}


def _logged(history: list[dict[str, Any]], heads: list[Head]) -> dict[str, float]:
    return {path: entry[key] for path, key in _log_keys(heads).items() for entry in history if key in entry}


def _set_peaks(optimizer: Any, scheduler: Any, peaks: dict[str, float]) -> None:
    """Change the peak learning rates of the heads in the middle of a schedule."""
    for index, group in enumerate(optimizer.param_groups):
        peak = peaks.get(group.get(MARK))
        if peak is None:
            continue
        group["lr"] = peak * (group["lr"] / group["initial_lr"])
        group["initial_lr"] = peak
        # Where schedulers remember rates: the most, those that start from the rates they find, and GreedyLR.
        for name, rate in {"base_lrs": peak, "_init_lrs": peak, "_last_lr": group["lr"]}.items():
            remembered = getattr(scheduler, name, None)
            if remembered is not None:
                remembered[index] = rate
