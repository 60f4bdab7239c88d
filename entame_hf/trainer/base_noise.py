"""How noisy the first error would have been under the usual head, measured on the run's own first batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..energy import error_energy
from ..heads import find_heads, num_classes, num_features

KEY = "energy/base_noise_share"


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
        if state.global_step == 0 and wanted:
            heads = find_heads(self.trainer.model, self.trainer.entame_config().head)
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
            state.log_history.append({KEY: float(self._share), "step": state.global_step})
            self._share = None
