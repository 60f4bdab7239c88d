"""Peers beyond the paper: LP-FT, layer-wise decay, BiT, a decaying head; and the arguments of a run of any method."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from timm.optim import param_groups_layer_decay
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.heads import find_heads
from entame_hf.patch import frozen_backbone_parameters

from .starts import FittedStart

# What each start fits: a classifier of raw features, or scales a fitted one of normalised features.
_STARTS = {"logistic": "keep", "temperature": "informed"}


@dataclass
class RunArguments(EntameTrainingArguments):
    """Arguments of a run: the paper's defaults (constant learning rate, no clipping), and what peers need."""

    # The paper evaluates with the last batch's statistics, however small it is.
    znorm_refresh_samples: int | None = 0
    schedule: str | None = field(
        default=None,
        metadata={
            "help": "Train in two phases, as peers do, decay the head learning rate, or take BiT's schedule.",
            "choices": ["lp_ft", "fastai", "head_decay", "bit"],
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
    head_start: str | None = field(
        default=None,
        metadata={
            "help": "Before training, fit a logistic probe to convergence, or scale a ridge head to the temperature "
            "that fits.",
            "choices": ["logistic", "temperature"],
        },
    )
    layer_decay: float | None = field(
        default=None, metadata={"help": "Each layer's learning rate over that of the layer after it."}
    )
    fastai_head: bool = field(default=False, metadata={"help": "fastai: replace the head by fastai's own."})
    pass_epochs: float = field(
        default=0.0, metadata={"help": "Train for so much less: what a pass over the images before training costs."}
    )
    corruptions: bool = field(default=False, metadata={"help": "Evaluate on corrupted test splits at the end."})
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
        if self.fastai_head and self.schedule != "fastai":
            raise ValueError("`fastai_head=True` needs `schedule=fastai`, which trains all of that head's layers.")
        if self.head_start is not None and self.entame_method != (needed := _STARTS[self.head_start]):
            raise ValueError(f"`head_start={self.head_start}` needs `entame_method={needed}`.")


class RunTrainer(EntameTrainer):
    """An [`EntameTrainer`] without what costs time in each step and is only logged, and with what peers need."""

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, source: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What names the pretrained model and the images.
        self.source = source
        self.add_callback(FittedStart(self))

    # Without clipping, Trainer computes the norm for the log alone. No public hook skips it.
    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm

    # Layer-wise decay needs one group a layer: as BEiT, MAE and timm do it.
    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        optimizer = super().create_optimizer(model)
        if self.args.layer_decay is not None:
            own, args = self.model.timm_model, self.args
            without: set[str] = getattr(own, "no_weight_decay", set)()
            groups = param_groups_layer_decay(own, args.weight_decay, without, layer_decay=args.layer_decay)
            common = optimizer.param_groups[0]
            optimizer.param_groups.clear()
            for group in groups:
                rate = args.learning_rate * group.pop("lr_scale")
                optimizer.add_param_group({**common, **group, "lr": rate})
        return optimizer


class TwoPhaseTrainer(RunTrainer):
    """Freeze the backbone, or most of it, in the first epochs; then start a new schedule and optimizer state."""

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


class BitSchedule(RunTrainer):
    """BiT's schedule for small datasets: linear warm-up for a fifth of the steps, a tenth less at 2, 3 and 4 fifths.

    Source: [`bit_hyperrule.py`](https://github.com/google-research/big_transfer/blob/master/bit_hyperrule.py)
    (Apache-2.0), of Kolesnikov et al., [Big Transfer](https://arxiv.org/abs/1912.11370), 2020.
    """

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        def factor(step: int) -> float:
            fifths = 5 * step / num_training_steps
            return fifths if fifths < 1 else 0.1 ** max(0, int(fifths) - 1)

        self.lr_scheduler, self._created_lr_scheduler = LambdaLR(self.optimizer, factor), True
        return self.lr_scheduler
