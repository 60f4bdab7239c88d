"""Callbacks of the trainer."""

from __future__ import annotations

import math
from typing import Any

from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import IterableDataset
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState
from transformers.utils import logging

from ..data import BatchDataset, StreamingDataset
from ..errors import InputError
from ..patch import normalised_heads, set_trained
from .loss import ClassificationLoss, scales_loss
from .resume import check_finite

logger = logging.get_logger(__name__)


class TrainedHeadCallback(TrainerCallback):
    """Note after a step that the heads are trained, so that nothing wipes them unasked."""

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        set_trained(kwargs["model"])
        if state.global_step == 1:
            check_normalised(kwargs["model"])


def check_normalised(model: nn.Module) -> None:
    """Refuse to go on if a step has normalised no feature, though heads are there to do so.

    Statistics that a pass over the images has measured serve batches of one image too.
    """
    heads = list(normalised_heads(model))
    if heads and not any(leaf.znorm.largest_batch > 0 or leaf.znorm.mean.any() for _, leaf in heads):
        raise InputError(
            f"The first step has normalised nothing before `{heads[0][0]}`. If batches hold one image, set a larger "
            "`per_device_train_batch_size` or `entame_method=mei`. If the model never calls this layer, name the one "
            "that it calls: `EntameConfig(head=...)`."
        )


class PerRankSeedCallback(TrainerCallback):
    """Give each rank its own random numbers: with Trainer's one seed, dropout is the same on all ranks.

    Rank 0 keeps its numbers. The model and the order of the data, which ranks share, are made before; a checkpoint's
    random numbers, one file a rank, are loaded afterwards.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if args.process_index > 0:
            # NumPy takes no larger seeds.
            set_seed((args.seed + args.process_index) % 2**32)


class _WithoutEnergies(TrainerCallback):
    """Leave out a dozen values a step, which are for trackers and the log history."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        shown = {name: value for name, value in logs.items() if not name.startswith("energy/")}
        if set(shown) - {"epoch"}:
            super().on_log(args, state, control, logs=shown, **kwargs)


class ProgressWithoutEnergies(_WithoutEnergies, ProgressCallback):
    """Show what `ProgressCallback` shows, without energies."""


class PrinterWithoutEnergies(_WithoutEnergies, PrinterCallback):
    """Print what `PrinterCallback` prints, without energies."""


def hide_energies(trainer: Any) -> None:
    """Replace Trainer's own console callback by one that leaves energies out."""
    ours = {ProgressCallback: ProgressWithoutEnergies, PrinterCallback: PrinterWithoutEnergies}
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [ours[type(each)]() if type(each) in ours else each for each in callbacks]


class EarlyEvaluation(TrainerCallback):
    """Evaluate after each of the first steps: methods differ most there.

    Args:
        steps (`int`, *optional*, defaults to 10): the paper's tables average over ten.
    """

    def __init__(self, steps: int = 10) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step <= self.steps:
            control.should_evaluate = True


# Loss scaling starts at 65,536 and halves with each step that it skips.
_VANISHED = 2.0**-14


class FiniteCheck(TrainerCallback):
    """Stop a training whose losses or weights are not finite any more, before anything of it is saved.

    It looks at each logged loss, those of evaluations and of the whole run too, and at the weights whenever a loss is
    logged, before each checkpoint and at the end. With fp16, loss scaling may skip steps, whose loss does not count;
    the training stops once it skips all of them.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not self.trainer.is_in_train:
            return
        sets, logs = self.trainer.eval_dataset, kwargs.get("logs") or {}
        evaluated = [f"eval_{name}_loss" for name in sets] if isinstance(sets, dict) else ["eval_loss"]
        losses = {name: float(logs[name]) for name in ("loss", "train_loss", *evaluated) if name in logs}
        scaler = self.trainer.accelerator.scaler
        if "loss" in losses and scales_loss(self.trainer):
            # DeepSpeed stops by itself once its scale has vanished.
            losses["loss"] = math.nan if scaler is not None and scaler.get_scale() < _VANISHED else 0.0
        if losses:
            check_finite(kwargs["model"], args, state, losses)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        check_finite(kwargs["model"], args, state)


class UnusedCheck(TrainerCallback):
    """Refuse options and methods that a subclass leaves unused, and parameters that no optimizer will update."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._has_stepped = False

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._has_stepped = False
        if type(self.trainer).create_optimizer_and_scheduler is not Trainer.create_optimizer_and_scheduler:
            raise InputError(
                "create_optimizer_and_scheduler of your own is never called: Trainer builds one after the other. "
                "Override create_optimizer(self, model=None), and create_scheduler if need be."
            )
        data, order = self.trainer.train_dataset, getattr(args, "train_sampling_strategy", "random")
        if args.dataloader_drop_last and isinstance(data, IterableDataset) and not isinstance(data, BatchDataset):
            logger.warning(
                "`dataloader_drop_last=True` has no effect: Trainer keeps the last batch of a stream of your own. "
                "Leave it out, or end the stream with a full batch."
            )
        if order == "sequential" and isinstance(data, StreamingDataset):
            raise InputError(
                "`train_sampling_strategy=sequential` has no effect on this stream, which is shuffled in each pass. "
                "Leave it out, or give a stream of your own."
            )
        groups = self.trainer.optimizer.param_groups
        scales = {group.get("lr_scale", 1.0) for group in groups}
        if len(scales) > 1 and len({group.get("initial_lr", group["lr"]) for group in groups}) == 1:
            raise InputError(
                "The optimizer's groups have timm's `lr_scale`, which timm's schedulers alone apply: all layers would "
                'train at one rate. Before training: for group in optimizer.param_groups: group["lr"] *= '
                'group["lr_scale"].'
            )
        if "create_optimizer" not in self.trainer.reached and not self.trainer.is_deepspeed_enabled:
            self.trainer.head_rates.assign(self.trainer.optimizer, ours=False)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._has_stepped:
            return
        self._has_stepped = True
        loss, warmup = self.trainer.label_smoother, self.trainer.head_args.warmup_steps_of_head()
        if self.trainer.compute_loss_func is None and isinstance(loss, ClassificationLoss) and not loss.was_called:
            if loss.class_weights is not None:
                raise InputError(
                    "class_weights have no effect: compute_loss of your own does not use them. Call "
                    "super().compute_loss() or self.label_smoother(outputs, labels) in it, or leave class_weights out."
                )
            if loss.epsilon:
                logger.warning(
                    f"`label_smoothing_factor={loss.epsilon:g}` has no effect unless compute_loss of your own reads "
                    "it. Call super().compute_loss() or self.label_smoother(outputs, labels) in it, or leave it out."
                )
        if warmup and "training_step" not in self.trainer.reached:
            raise InputError(
                f"`head_warmup_steps={warmup}` has no effect: training_step of your own updates the backbone too. "
                "Call super().training_step() in it, or set `head_warmup_steps=0`."
            )

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._check_updated()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._check_updated()

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._check_updated()

    def _check_updated(self) -> None:
        """Refuse parameters that were unfrozen or replaced since the optimizer was built."""
        trainer = self.trainer
        # Sharding replaces parameters.
        if not trainer.is_in_train or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return
        new = {
            name: parameter
            for name, parameter in trainer.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in trainer.trainable
        }
        held = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
        name = next((name for name, parameter in new.items() if id(parameter) not in held), None)
        if name is not None:
            raise InputError(
                f"`{name}` was unfrozen or replaced after the optimizer was built, which never updates it. Let it "
                "require gradients before train(), and freeze it in on_train_begin until it is to be trained; or call "
                "train() a second time, with `entame_method=keep`."
            )
