"""What happens at steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .energy import ErrorEnergy, error_energy, noise_share
from .patch import mark_trained


class EnergyRecorder:
    """Average the energy of the error over the micro-batches of an optimizer step."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._count = 0

    def observe(self, logits: Any, labels: Any) -> None:
        """Add the energy of a micro-batch, weighted by its examples; what has no energy is left out.

        A diagnosis must never stop a training: ignored labels, other shapes and other tasks' outputs pass.
        """
        if not isinstance(logits, Tensor) or logits.ndim != 2 or not isinstance(labels, Tensor):
            return
        if labels.numel() == len(logits) and not labels.is_floating_point():
            labels = labels.flatten()
            counted = (labels >= 0) & (labels < logits.shape[1])
            logits, labels = logits[counted], labels[counted]
        elif labels.shape != logits.shape:
            return
        if not len(logits):
            return
        weighted = torch.stack(error_energy(logits.detach(), labels)) * len(logits)
        self._sums = weighted if self._sums is None else self._sums + weighted
        self._count += len(logits)

    def take(self) -> dict[str, float]:
        """Return the step's means under `energy/...` and start over; empty where nothing was observed."""
        if self._sums is None:
            return {}
        energy = ErrorEnergy(*(self._sums / self._count))
        self._sums, self._count = None, 0
        # The share of means, which is what the definition averages; not the mean of shares.
        energy = energy._replace(noise_share=noise_share(energy.estimates, energy.total))
        return {f"energy/{name}": float(value) for name, value in energy._asdict().items()}


class StepCallback(TrainerCallback):
    """Log the energies of a step and note that the head has begun to learn.

    Args:
        energies ([`EnergyRecorder`]): filled by the trainer's loss.
        log (callable): the trainer's `log`; callbacks get no trainer.
    """

    def __init__(self, energies: EnergyRecorder, log: Any) -> None:
        self.energies, self.log = energies, log

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        mark_trained(kwargs["model"])
        energies = self.energies.take()
        if energies:
            # Logging ticks the box: without this, the step's own loss would go unlogged.
            wanted = control.should_log
            self.log(energies)
            control.should_log = wanted


class EarlyEvaluation(TrainerCallback):
    """Evaluate after each of the first steps, where ENTAME and its peers differ most.

    Args:
        steps (`int`, *optional*, defaults to 10): the paper's tables average over ten.
    """

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step <= self.steps:
            control.should_evaluate = True
