"""Peers beyond the paper: LP-FT, fastai, a decaying head learning rate; and the arguments of a run of any method."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.heads import find_heads
from entame_hf.patch import frozen_backbone_parameters

# fastai trains these in its frozen epoch too.
_NORMALISATIONS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm)


@dataclass
class RunArguments(EntameTrainingArguments):
    """Arguments of a run: the paper's defaults (constant learning rate, no clipping), and what peers need."""

    schedule: str | None = field(
        default=None,
        metadata={
            "help": "Train in two phases, as peers do, or decay the head learning rate.",
            "choices": ["lp_ft", "fastai", "head_decay"],
        },
    )
    probe_epochs: int = field(default=1, metadata={"help": "lp_ft: epochs of the linear probe."})
    probe_learning_rate: float | None = field(
        default=None, metadata={"help": "lp_ft: learning rate of the linear probe; `learning_rate` by default."}
    )
    decay_steps: int = field(
        default=1, metadata={"help": "head_decay: steps until the head has the base learning rate."}
    )
    zero_head: bool = field(default=False, metadata={"help": "Set the head to zero before training."})
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "Clip gradients to this norm; 0 is off, as in the paper."}
    )
    dataloader_drop_last: bool = field(default=True, metadata={"help": "Whether to drop a smaller last batch."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "lp_ft" and not 0 < self.probe_epochs < self.num_train_epochs:
            raise ValueError(
                f"`probe_epochs={self.probe_epochs}` must be at least 1 and leave an epoch of "
                f"`num_train_epochs={self.num_train_epochs:g}` for the fine-tuning."
            )
        if self.schedule == "fastai" and self.peak_head_lr(self.learning_rate) is not None:
            raise ValueError(
                "`schedule=fastai` sets the head learning rate. Leave out `head_lr` and `head_lr_multiplier`."
            )


class RunTrainer(EntameTrainer):
    """An [`EntameTrainer`] without what costs time in each step and is only logged."""

    # Without clipping, Trainer computes the norm for the log alone. No public hook skips it.
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm


class TwoPhaseTrainer(RunTrainer):
    """Freeze the backbone, or most of it, in the first epochs; then start a new schedule and optimizer state."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_Phases(self))

    @property
    def first_epochs(self) -> int:
        """Return the number of epochs of the first phase."""
        raise NotImplementedError

    def first_phase(self) -> AbstractContextManager[None]:
        """Freeze what the first phase does not train, inside the context."""
        raise NotImplementedError

    def scheduler(self, phase: int, steps: int) -> LRScheduler:
        """Build the schedule of phase 0 or 1."""
        raise NotImplementedError

    # Each phase has its own schedule. The first starts here, as the optimizer has its groups by now.
    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        first = round(num_training_steps * self.first_epochs / self.args.num_train_epochs)
        self.steps = first, num_training_steps - first
        self.lr_scheduler, self._created_lr_scheduler = self.scheduler(0, first), True
        return self.lr_scheduler


class _Phases(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.stack = trainer, ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stack.enter_context(self.trainer.first_phase())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == self.trainer.steps[0]:
            self.stack.close()
            self.trainer.optimizer.state.clear()
            self.trainer.lr_scheduler = self.trainer.scheduler(1, self.trainer.steps[1])


class ProbeThenFineTune(TwoPhaseTrainer):
    """LP-FT: a linear probe for `probe_epochs`, then fine-tuning for the other epochs.

    The authors keep BatchNorm in eval mode in both phases: set `freeze_statistics`. The mode is the same in both
    phases either way, as a head fits the features of one mode only. The learning rates are constant:
    `probe_learning_rate`, then `learning_rate`. The authors sweep them; here they are set. `head_lr_multiplier`
    applies to both phases.

    Source: Kumar et al., [Fine-tuning can distort pretrained features and underperform
    out-of-distribution](https://arxiv.org/abs/2202.10054), 2022.
    """

    @property
    def first_epochs(self) -> int:
        return self.args.probe_epochs

    def first_phase(self) -> AbstractContextManager[None]:
        return frozen_backbone_parameters(self.model, find_heads(self.model))

    def scheduler(self, phase: int, steps: int) -> LRScheduler:
        probe = self.args.probe_learning_rate or self.args.learning_rate
        factor = probe / self.args.learning_rate if phase == 0 else 1.0
        # Relative to the groups' own learning rates.
        return LambdaLR(self.optimizer, lambda _: factor)


class FastaiFineTune(TwoPhaseTrainer):
    """The schedule of fastai's `Learner.fine_tune(epochs - 1, base_lr=learning_rate)`, with its defaults.

    The same as in fastai: first one epoch with a frozen backbone. Its normalisation layers train, at a tenth of the
    head learning rate, and update their running statistics. The head has one cycle (`pct_start` 0.99, `div` 25) up to
    `base_lr`. Then all parameters train with one cycle (0.3, 5) up to `base_lr` / 2 for the head, 1/100 of that for
    the first layers and the geometric mean for those between. Each cycle ends at 1e-5 of its peak and takes Adam's
    first momentum from 0.95 to 0.85 and back. Adam's state is cleared between the two.

    Different from fastai: the head is the architecture's own, not two layers over two poolings. Adam has no weight
    decay (0.01 in fastai), a second momentum of 0.999 (0.99) and ε of 1e-8 (1e-5), as all methods here. The frozen
    epoch is one of `num_train_epochs`, so that no method trains longer. fastai cuts torchvision's backbones by hand, a
    ResNet after its second stage, and timm's not at all; here the cut is after half of the parameter tensors, which in
    a ResNet-50 is within a block of that.

    Source: [`fastai/callback/schedule.py`](https://github.com/fastai/fastai/blob/main/fastai/callback/schedule.py)
    (Apache-2.0).
    """

    LR_MULT = 100
    DIV_FINAL = 1e5
    PCT_START, DIV = (0.99, 0.3), (25.0, 5.0)

    @property
    def first_epochs(self) -> int:
        return 1

    # Discriminative learning rates need one group each. Without decay, Trainer's groups make no difference.
    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        optimizer = super().create_optimizer(model)
        learned = [parameter for head in self.heads() for parameter in head.module.parameters()]
        heads = {id(parameter) for parameter in learned}
        backbone = [p for p in self.model.parameters() if id(p) not in heads]
        early, late = backbone[: len(backbone) // 2], backbone[len(backbone) // 2 :]
        common = optimizer.param_groups[0]
        optimizer.param_groups.clear()
        for parameters in (early, late, learned):
            optimizer.add_param_group({**common, "params": parameters})
        return optimizer

    @contextmanager
    def first_phase(self) -> Iterator[None]:
        heads = [head.module for head in find_heads(self.model)]
        learning = [m for m in self.model.modules() if m in heads or isinstance(m, _NORMALISATIONS)]
        kept = {id(parameter) for module in learning for parameter in module.parameters()}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in kept]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def scheduler(self, phase: int, steps: int) -> LRScheduler:
        peak = self.args.learning_rate
        if phase == 0:
            peaks = [peak / 10, peak / 10, peak]
        else:
            peaks = [peak / 2 / self.LR_MULT, peak / 2 / self.LR_MULT**0.5, peak / 2]
        return OneCycleLR(
            self.optimizer,
            peaks,
            total_steps=steps + 1,
            pct_start=self.PCT_START[phase],
            div_factor=self.DIV[phase],
            final_div_factor=self.DIV_FINAL / self.DIV[phase],
        )


class DecayingHead(RunTrainer):
    """Decay the head learning rate linearly to the base learning rate, over `decay_steps`."""

    # Relative to the group's own learning rate, which is measured later.
    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        def factor(group: dict[str, Any], step: int) -> float:
            end = min(1.0, self.args.learning_rate / group["initial_lr"])
            return end + (1 - end) * max(0.0, 1 - step / self.args.decay_steps)

        own: Any = self.optimizer
        factors: list[Any] = [partial(factor, group) for group in own.param_groups]
        self.lr_scheduler, self._created_lr_scheduler = LambdaLR(own, factors), True
        return self.lr_scheduler


TRAINERS: dict[str | None, type[RunTrainer]] = {
    None: RunTrainer,
    "lp_ft": ProbeThenFineTune,
    "fastai": FastaiFineTune,
    "head_decay": DecayingHead,
}
