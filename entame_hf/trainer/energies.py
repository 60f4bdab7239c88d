"""Measure the error of a run's steps, and log it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, has_length

from ..config import first_step_bound, noise_to_signal_ratio
from ..energy import StepEnergies, energy_of_batch
from ..heads import num_features
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

    The log history alone gets `base_noise_share`, once: `noise_share` of the first micro-batch, had `base` drawn the
    head from the run's seed. It is left out with smoothed labels, and for several heads or one that reads positions.

    Source: sections 2 to 5 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.record: StepEnergies | None = None
        self._base_noise: Tensor | None = None

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # A step that was cut off has left some.
        self.record = self._base_noise = None
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
            if self.trainer.state.global_step == 0 and self._base_noise is None:
                self._base_noise = self._noise_of_base(self.record, labels)
            self.record.add_error(
                logits[0] if isinstance(logits, tuple) and logits else logits,
                labels,
                smoothing=0.0 if smoother is None else smoother.epsilon,
            )

    def _noise_of_base(self, record: StepEnergies, labels: Any) -> Tensor | None:
        args, features = self.trainer.args, record.features
        if len(record.heads) > 1 or args.label_smoothing_factor or features is None:
            return None
        weight = torch.empty(record.classes, num_features(record.heads[0].module))
        nn.init.kaiming_normal_(weight, mode="fan_out", generator=torch.Generator().manual_seed(args.seed))
        found = energy_of_batch(features.reshape(-1, weight.shape[1]).float() @ weight.to(features.device).T, labels)
        return found and found[1].noise_share

    def observe_gradients(self) -> None:
        """Measure the gradients that a step's backwards have left, before they are clipped."""
        if self.record is not None:
            self.record.add_gradients(self.trainer.model, self.trainer.accelerator)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.record is None:
            return
        examples, values = self.record.results(self.trainer.accelerator)
        config, classes, gamma = self.trainer.entame_config(), self.record.classes, args.learning_rate
        self.record = None
        if state.global_step == 1 and config.init == "mei" and gamma > 0 and examples:
            values["phi_w"] = config.weight_variance(classes, gamma)
            values["head_weights_bound"] = first_step_bound(config, classes, gamma, examples)
            values["noise_after_first_step"] = noise_to_signal_ratio(config, classes, gamma, examples)
        if self._base_noise is not None:
            # Trackers would draw a curve of one point.
            state.log_history.append({BASE_NOISE_SHARE: float(self._base_noise), "step": state.global_step})
            self._base_noise = None
        # Logging ticks the box: without this, the step's own loss would go unlogged.
        wanted = control.should_log
        self.trainer.log({f"{PREFIX}{name}": value for name, value in values.items() if math.isfinite(value)})
        control.should_log = wanted


def is_measured(args: TrainingArguments, state: TrainerState, first_steps: int, dataloader: Any) -> bool:
    """Tell, before a step, whether it is one of the first or one at which Trainer will log its loss."""
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
