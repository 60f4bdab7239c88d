"""A `Trainer` that starts every head at maximum entropy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ..config import EntameConfig
from ..data.batches import to_device
from ..errors import InputError
from ..heads import TIMM_PREFIX, Head, find_heads, is_peft
from ..patch import (
    applied_config,
    as_transformers,
    clear_entame_state,
    describe_adaptation,
    folded,
    frozen_backbone,
    frozen_statistics,
    set_trained,
    shareable_config,
    stock_state_dict,
)
from ..training_args import AUTO, HeadArguments
from .callbacks import OwnRandomness, TrainedMark
from .checkpoint import load_head_state, load_weights, prepare_heads, save_head_state, saved_config
from .energy_recorder import EnergyRecorder
from .evaluation import EvaluatingTrainer
from .head_lr import HeadRates
from .hub import HubTrainer
from .loading import FeedingTrainer
from .parallel import check_optimizer, check_processes, check_sharding, normalise_in_float32
from .report import ReportingTrainer
from .schedule import counted_shares, said_of_schedules
from .start import start_heads

logger = logging.get_logger(__name__)


class EntameTrainer(ReportingTrainer, EvaluatingTrainer, HubTrainer, FeedingTrainer):
    """Fine-tune an image classifier with ENTAME: a drop-in for [`Trainer`].

    When `train()` starts afresh, the heads are drawn (with `args.seed`) and their features normalised; when it
    resumes, the checkpoint's are loaded. Nothing happens to a model that is only evaluated. Every checkpoint holds the
    folded stock model, which loads without this package.

    Args:
        model (`torch.nn.Module`, *optional*): as for [`Trainer`]; a bare timm model is wrapped for transformers.
        args (`TrainingArguments` or [`EntameTrainingArguments`], *optional*):
            With the former, the head's options have their defaults.
        trainer_args: everything else [`Trainer`] takes, by position or by name, and `class_weights` (`torch.Tensor`):
            (C,), how much each class counts in the loss.
        entame ([`EntameConfig`], *optional*):
            Goes before `args`. Where neither says anything, but perhaps a recipe, and [`apply_entame`] was called on
            the model, the configuration given there is used; where one of them asks for another, `train()` says so.

    Raises:
        InputError: on `train()`, the model was adapted already, by this trainer or according to its config, and its
            head would be wiped.

    Example:

    ```python
    >>> import timm
    >>> from entame_hf import EntameTrainer, EntameTrainingArguments

    >>> model = timm.create_model("resnet18", num_classes=10)
    >>> trainer = EntameTrainer(model, EntameTrainingArguments("out"), train_dataset=train_dataset)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    ```
    """

    args: Any
    model: Any
    state: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *trainer_args: Any,
        entame: EntameConfig | None = None,
        **trainer_kwargs: Any,
    ) -> None:
        if args is None:
            args = TrainingArguments("tmp_trainer")
        check_processes(args)
        wrapped = None if model is None else as_transformers(model)
        super().__init__(wrapped, args, *trainer_args, **trainer_kwargs)
        self.entame = entame.under(TIMM_PREFIX) if entame is not None and wrapped is not model else entame
        # Most vision models take **kwargs and scale nothing, which Trainer mistakes for a loss that is already
        # divided: gradients would grow with gradient accumulation (transformers#47688).
        self.model_accepts_loss_kwargs = False
        self.energies = EnergyRecorder(self)
        self.head_rates = HeadRates(self)
        self.add_callback(OwnRandomness())
        self.add_callback(TrainedMark())
        self.add_callback(self.energies)
        self.add_callback(self.head_rates)
        self._micro_batches: list[int] = []
        # Examples of a micro-batch, in a window whose micro-batches differ; None in all others.
        self._mean_batch: Any = None

    @property
    def head_args(self) -> HeadArguments:
        """The head's options: `args` where it has them, else their defaults."""
        return self.args if isinstance(self.args, HeadArguments) else HeadArguments()

    def entame_config(self) -> EntameConfig:
        """Resolve what is done to the heads: the argument `entame`, else `args`, else [`apply_entame`]'s."""
        if self.entame is not None:
            return self.entame
        own = self.head_args
        return (applied_config(self.model) if own.leaves_config_open() else None) or own.entame_config()

    # A bare timm model from model_init needs the wrapper too.
    def call_model_init(self, trial: Any = None) -> nn.Module:
        return as_transformers(super().call_model_init(trial))

    # The last moment before the optimizer sees the parameters, and after a trial has set its learning rate.
    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        own = self.head_args
        check_sharding(self.accelerator, self.entame_config(), own.warmup_steps_of_head(), own.head_lr == AUTO)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if sharded and self.accelerator.mixed_precision != "no":
            normalise_in_float32(self.model)
        if resume_from_checkpoint is not None:
            self._prepare_resuming(resume_from_checkpoint)
        else:
            start_heads(
                self.model,
                self.entame_config(),
                learning_rate=self.args.learning_rate,
                seed=self.args.seed,
                batch_size=self._train_batch_size * self.args.world_size,
                accumulation=self.args.gradient_accumulation_steps,
            )
        if self.args.device.type == "cpu" and not sharded:
            self.model.to(memory_format=torch.channels_last)
        try:
            with self._frozen():
                return super()._inner_training_loop(
                    batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
                )
        except RuntimeError:
            if self.args.auto_find_batch_size:
                # It may be tried again with a smaller batch, from a new head.
                clear_entame_state(self.model)
            raise

    # The heads' own learning rate needs a parameter group of their own before the scheduler reads the groups.
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        ours = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if self.args.save_strategy != SaveStrategy.NO:
            check_optimizer(self.accelerator, optimizer)
        self.head_rates.assign(optimizer, ours)
        return optimizer

    # What a recipe knows of warm-up and decay are shares of the steps.
    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        with counted_shares(self.args, num_training_steps), said_of_schedules(self.args):
            return super().create_scheduler(num_training_steps, optimizer)

    def heads(self) -> list[Head]:
        """Find the heads of the model in training."""
        return find_heads(self.model, self.entame_config().head)

    def _frozen(self) -> AbstractContextManager[None]:
        """What stands still, by the arguments, does so while this context lasts."""
        if self.head_args.freeze_backbone:
            return frozen_backbone(self.model, self.heads())
        return frozen_statistics(self.model) if self.head_args.freeze_statistics else nullcontext()

    def _head_parameters(self) -> list[nn.Parameter]:
        return [parameter for head in self.heads() for parameter in head.module.parameters()]

    # An epoch's last window may hold a smaller micro-batch, or a smaller part of one on some processes: its mean loss
    # counts for its examples, not for a batch.
    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._micro_batches = [find_batch_size(batch) or 0 for batch in batches]
        self._mean_batch = None
        parts_differ = self.parts_differ and self.accelerator.gradient_state.end_of_dataloader
        if parts_differ or len(set(self._micro_batches)) > 1:
            self._mean_batch = sum(self._micro_batches) / len(batches)
        if parts_differ:
            mean = to_device(torch.tensor(self._mean_batch), self.args.device)
            self._mean_batch = self.accelerator.reduce(mean, "mean")
        return batches, num_items

    # The only place that sees a micro-batch's loss, logits and labels together.
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        labels, examples = inputs.get("labels"), find_batch_size(inputs)
        with self.energies.watching(), self.head_rates.watching():
            loss, outputs = super().compute_loss(model, inputs, True, *args, **kwargs)
        if model.training and self._micro_batches:
            self.base_noise.observe(labels)
            if self.compute_loss_func is None and self._mean_batch is not None:
                loss = loss * (examples / self._mean_batch)
            self.energies.observe(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    # Head warm-up: after the backward, before clipping. Without gradients the optimizer skips the backbone and its
    # state, and DDP's reducer has done its work, so that nothing is frozen or unfrozen under it.
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if not self.accelerator.sync_gradients:
            return loss
        self.energies.observe_gradients()
        self.head_rates.observe_gradients()
        if self.state.global_step < self.head_args.warmup_steps_of_head():
            heads = {id(parameter) for parameter in self._head_parameters()}
            for parameter in self.model.parameters():
                if id(parameter) not in heads:
                    parameter.grad = None
        return loss

    # The stock model is what is written, and it says what was done to it; going on needs what folding loses.
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        applied = applied_config(self.model)
        method, rate, rates = self.head_args.entame_method, self.args.learning_rate, self.head_rates.record()
        record = describe_adaptation(self.model, method, rate, rates)
        with shareable_config(self.model, record):
            super()._save(output_dir, stock_state_dict(self.model, state_dict))
        if applied and self.args.should_save:
            save_head_state(self.model, applied, output_dir or self.args.output_dir, state_dict)

    # The un-folded head and its statistics need a place in the model before they are loaded.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._prepare_resuming(resume_from_checkpoint)
        self._load_stock(resume_from_checkpoint, partial(super()._load_from_checkpoint, resume_from_checkpoint, model))

    def _prepare_resuming(self, folder: str) -> None:
        """Give the heads the structure of a checkpoint's; a model must have it before it is sharded."""
        self.head_rates.check_resuming(folder)
        config = saved_config(folder)
        if config is None:
            logger.warning_once(f"{folder} was not trained with ENTAME: going on without it.")
        elif config != self.entame_config():
            raise InputError(
                f"{folder} was trained with {config}, and this run asks for {self.entame_config()}. Resume with the "
                "same configuration, or start a new run from it."
            )
        elif applied_config(self.model) != config:
            prepare_heads(self.model, config)

    # The best model goes on being evaluated here, un-folded, with its own statistics.
    def _load_best_model(self) -> None:
        self._load_stock(self.state.best_model_checkpoint, super()._load_best_model)

    def _load_stock(self, folder: str, load: Callable[[], None]) -> None:
        """Load a checkpoint's model, by Trainer's `load` where there is no better way, and its heads as they train."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            # Shards are saved and loaded as they train.
            load()
            set_trained(self.model)
            return
        if is_peft(self.model):
            with folded(self.model):
                load()
        elif not load_weights(self.model, folder):
            load()
        load_head_state(self.model, folder)
