"""Measure the error of a run's steps, and log it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, has_length

from ..config import first_step_bound, noise_to_signal_ratio
from ..energy import StepEnergies, error_energy
from ..heads import num_classes, num_features
from .labels import has_several_labels

PREFIX = "energy/"

BASE_NOISE_SHARE = f"{PREFIX}base_noise_share"


class EnergyRecorder(TrainerCallback):
    """Log, for some steps of a training, where the error comes from and how much of it reaches the features.

    Measured are the first `energy_logging_steps` steps, and from then on the steps at which Trainer logs its loss. All
    values are those of the whole optimizer step: every micro-batch and every process, without loss scaling, before
    gradients are clipped. With a = W x + b the logits, ŷ = softmax(a), y the labels, and 𝓛 the mean loss of the step's
    N examples:

    | `energy/...` | |
    |---|---|
    | `estimates` | E[ŷŷᵀ]; this and the next five are [`error_energy`]'s |
    | `labels` | E[yyᵀ]; smoothed labels count as such |
    | `alignment` | E[ŷyᵀ] |
    | `total` | E‖ŷ − y‖² = `estimates` + `labels` − 2 · `alignment` |
    | `noise_share` | `estimates` / `total`: noise while the head knows nothing; grows as the error shrinks |
    | `entropy` | E[−Σ ŷ ln ŷ], in nats |
    | `entropy_share` | `entropy` / ln C: 1 for a head that knows nothing and says so |
    | `features` | ‖δ^{L−1}‖² = E‖N · ∂𝓛/∂x‖², x as the backbone gives it: through feature normalisation as well |
    | `features_share` | `features` / `total`: what of the error's energy arrives; above 1 where a head amplifies it |
    | `feature_mean` | mean of each feature of x over the step, averaged over the features |
    | `feature_var` | biased variance of each feature of x over the step, averaged over the features |
    | `grad_norm_backbone` | ‖∂𝓛/∂θ‖ over all parameters but the heads' |
    | `grad_norm_head` | ‖∂𝓛/∂(W, b)‖ |
    | `head_weights` | E[W²] after the step |
    | `phi_w` | φ_w, E[W²] before the first step; only after that step, like the next two, and with such a head |
    | `head_weights_bound` | what `head_weights` may be then, see [`first_step_bound`] |
    | `noise_after_first_step` | Nλ², see [`noise_to_signal_ratio`] |

    Class weights count where gradients are measured, in `features` and `grad_norm_...`, and not at the logits. Several
    heads count as one that reads the features of all. Where a model gives several logits, energies are those of the
    first. Nothing is measured where images have several labels each: the error is that of a softmax. What cannot be
    measured is left out: energies without labels or with outputs of another shape, `features`
    where the backbone is frozen or DeepSpeed scales the loss (fp16), gradients and weights where a process holds
    shards of them (FSDP, DeepSpeed), and everything that overflowed. A step that is measured runs uncompiled, which
    leaves the compiled graph of the other steps alone.

    Args:
        trainer ([`EntameTrainer`]): the trainer whose steps are measured; callbacks are not told.

    Source: sections 2 to 5 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.record: StepEnergies | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.record = None
        first_steps = self.trainer.head_args.energy_logging_steps
        wanted = is_measured(args, state, first_steps, kwargs.get("train_dataloader"))
        if wanted and not has_several_labels(self.trainer.model):
            self.record = StepEnergies(self.trainer.heads(), args.device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what the heads read in the forward of this context, and what comes back to them afterwards."""
        if self.record is None:
            yield
            return
        with torch.compiler.set_stance("force_eager"), self.record.hooks():
            yield

    def observe(self, outputs: Any, labels: Any) -> None:
        """Measure the error at the logits of a micro-batch."""
        if self.record is not None:
            # A tuple holds the loss first, as Trainer has it, and the logits next.
            logits = outputs.get("logits") if isinstance(outputs, dict) else outputs[1:2]
            # A loss of the user's own goes before label smoothing.
            smoother = None if self.trainer.compute_loss_func else self.trainer.label_smoother
            self.record.add_error(
                logits[0] if isinstance(logits, tuple) and logits else logits,
                labels,
                smoothing=0.0 if smoother is None else smoother.epsilon,
            )

    def observe_gradients(self) -> None:
        """Measure the gradients that a step's backwards have left, before they are clipped."""
        if self.record is not None:
            self.record.add_gradients(self.trainer.model, self.trainer.accelerator)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.record is None:
            return
        examples, values = self.record.results(self.trainer.accelerator)
        config, classes, gamma = self.trainer.entame_config(), self.record.classes, args.learning_rate
        self.record = None
        if state.global_step == 1 and config.init == "mei" and gamma > 0 and examples:
            values["phi_w"] = config.weight_variance(classes, gamma)
            values["head_weights_bound"] = first_step_bound(config, classes, gamma, examples)
            values["noise_after_first_step"] = noise_to_signal_ratio(config, classes, gamma, examples)
        # Logging ticks the box: without this, the step's own loss would go unlogged.
        wanted = control.should_log
        self.trainer.log({f"{PREFIX}{name}": value for name, value in values.items() if math.isfinite(value)})
        control.should_log = wanted


def is_measured(args: TrainingArguments, state: TrainerState, first_steps: int, dataloader: Any) -> bool:
    """Tell, before a step, whether it is one of the first or one at which Trainer will log its loss.

    Args:
        args (`TrainingArguments`): how often Trainer logs.
        state (`TrainerState`): how far the training is.
        first_steps (`int`): how many first steps are measured; with 0, no step is.
        dataloader (iterable of batches): tells how long an epoch is, where it knows.
    """
    step = state.global_step + 1
    if step <= first_steps or first_steps == 0:
        return first_steps > 0
    if args.logging_strategy == IntervalStrategy.STEPS:
        return step % state.logging_steps == 0
    if args.logging_strategy == IntervalStrategy.EPOCH:
        batches = len(dataloader) if has_length(dataloader) else 0
        steps = math.ceil(batches / args.gradient_accumulation_steps)
        return step == state.max_steps or (steps > 0 and step % steps == 0)
    return False


class BaseNoise(TrainerCallback):
    """Put on record what noise share the first error would have had under `base`, a He fan-out head.

    That head is drawn from the run's seed, as `base` would have drawn it, and reads what the run's own head reads in
    the first micro-batch: one matrix product, once. The number goes to the log history, which checkpoints keep.
    Nothing is measured with `energy_logging_steps=0`, with smoothed labels, and for models that have several heads or
    one that reads positions.

    Args:
        trainer ([`EntameTrainer`]): the trainer whose first step is measured; callbacks are not told.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._hook: RemovableHandle | None = None
        self._features: Tensor | None = None
        self._share: Tensor | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        wanted = self.trainer.head_args.energy_logging_steps > 0 and not args.label_smoothing_factor
        if state.global_step == 0 and wanted and not has_several_labels(self.trainer.model):
            heads = self.trainer.heads()
            if len(heads) == 1:
                self._leaf = heads[0].module
                self._hook = self._leaf.register_forward_pre_hook(self._read)

    def _read(self, leaf: nn.Module, args: tuple[Any, ...]) -> None:
        self._features = args[0].detach() if args else None

    def observe(self, labels: Any) -> None:
        """Measure, after the first forward; does nothing after any other.

        Args:
            labels (`torch.Tensor` of shape `(N,)` or `(N, C)`): see [`error_energy`]; anything else is passed.
        """
        if self._hook is None:
            return
        self._hook.remove()
        features, self._features, self._hook = self._features, None, None
        rows, classes = num_features(self._leaf), num_classes(self._leaf)
        if features is None or not isinstance(labels, Tensor) or features.numel() != len(labels) * rows:
            return
        weight = torch.empty(classes, rows)
        generator = torch.Generator().manual_seed(self.trainer.args.seed)
        nn.init.kaiming_normal_(weight, mode="fan_out", generator=generator)
        logits = features.reshape(-1, rows).float() @ weight.to(features.device).T
        if labels.ndim == 1 and not labels.is_floating_point():
            counted = (labels >= 0) & (labels < classes)
            logits, labels = logits[counted], labels[counted]
        elif labels.shape != logits.shape:
            return
        if len(logits):
            self._share = error_energy(logits, labels).noise_share

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._share is not None:
            # Trackers would draw a curve of one point.
            state.log_history.append({BASE_NOISE_SHARE: float(self._share), "step": state.global_step})
            self._share = None
