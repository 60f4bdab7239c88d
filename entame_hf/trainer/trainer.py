"""A `Trainer` that starts every head at maximum entropy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from ..config import EntameConfig
from ..data import BatchDataset, for_evaluation, holds_batches
from ..files import explained_write_errors, write_file
from ..heads import TIMM_PREFIX, Head, find_heads
from ..patch import as_transformers
from ..training_args import EntameTrainingArguments, HeadArguments
from .callbacks import FiniteCheck, PerRankSeedCallback, TrainedHeadCallback, UnusedCheck, hide_energies
from .checkpoint import load_trained, prepare_resuming, save_trained, saved_processor
from .energies import EnergyRecorder
from .evaluation import Evaluations, EvaluationSums, own_rows, plain_numbers, resize_rows, unchanged_weights
from .files import locked_output_dir, make_output_dir, save_metrics
from .head_lr import HeadRates
from .hub import CheckpointUploads, HubTarget, check_push, push_folder
from .informed import HeadFitter
from .labels import LabelReader, are_classes, are_shares
from .loader import StepWeights, collate, explained_inputs, full_step, has_batch_norm, prepared_loader, temporarily
from .loss import ClassificationLoss, CustomLoss, LossFilter, choose_loss, read_class_weights, scales_loss
from .parallel import check_optimizer, check_output_folder, check_processes, same_on_all, set_log_level, share_buffers
from .provenance import check_provenance
from .report import try_to_write_card
from .restore import restore_state
from .resume import find_checkpoint, written_whole
from .sampler import count_stream, share_evenly, share_order
from .schedule import check_optimizer_options, complete_schedule, explain_optimizer_errors, resolve_ratios
from .start import begin_training, check_loaded, check_options, drop_gradients, prepare_model, resolve_config


class EntameTrainer(Trainer):
    """Fine-tune an image classifier with ENTAME: a drop-in for [`Trainer`].

    `train()` initialises the heads (with `args.seed`) and normalises their features, or loads them from the checkpoint
    that it resumes. A model that is only evaluated stays as it is. Every checkpoint holds the folded stock model: it
    loads in plain transformers or timm.

    Args:
        model (`torch.nn.Module`, *optional*): as for [`Trainer`]; a bare timm model is wrapped for transformers.
        args (`TrainingArguments`, *optional*):
            Defaults to [`EntameTrainingArguments`]. Plain `TrainingArguments` get the defaults of the heads' options.
        data_collator, train_dataset, eval_dataset, processing_class, model_init, compute_loss_func, compute_metrics,
            callbacks, optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: as for [`Trainer`].
        entame ([`EntameConfig`], *optional*):
            What is done to the heads. Takes precedence over `args`, see [`resolve_config`].
        class_weights (`torch.Tensor` or array, *optional*): (C,), how much each class counts in the loss; 1 each.

    Attributes:
        card_options (`dict`): arguments of every `create_model_card`, such as `{"dataset_tags": "uoft-cs/cifar10"}`.

    Example:

    ```python
    >>> import timm
    >>> from entame_hf import EntameTrainer, EntameTrainingArguments

    >>> model = timm.create_model("resnet18", num_classes=10)
    >>> trainer = EntameTrainer(model, EntameTrainingArguments("out"), train_dataset=train_dataset)  # doctest: +SKIP
    ```
    """

    args: Any
    model: Any
    state: Any
    label_smoother: Any
    hub_model_id: Any
    push_in_progress: Any = None

    # ---- Setup ----

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        entame: EntameConfig | None = None,
        class_weights: Any = None,
    ) -> None:
        args = EntameTrainingArguments("tmp_trainer") if args is None else args
        check_processes(args)
        make_output_dir(args)
        wrapped = None if model is None else as_transformers(model)
        check_loaded(wrapped, moves=not hasattr(wrapped, "hf_device_map"))
        super().__init__(
            *(wrapped, args, data_collator or collate, train_dataset, eval_dataset),
            saved_processor(processing_class, eval_dataset, train_dataset),
            *(model_init, compute_loss_func, compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs),  # type: ignore
            preprocess_logits_for_metrics,
        )
        set_log_level(args)
        check_options(self.model, args, self.head_args.save_dtype, self.is_deepspeed_enabled)
        self.entame = entame.under(TIMM_PREFIX) if entame is not None and wrapped is not model else entame
        # Most vision models take **kwargs and scale nothing. Trainer takes their loss for one that is divided already:
        # gradients would grow with gradient accumulation (transformers#47688).
        self.model_accepts_loss_kwargs = False
        choose_loss(self, None if class_weights is None else read_class_weights(class_weights, self))
        if compute_loss_func is not None:
            self.compute_loss_func = CustomLoss(compute_loss_func, args)
        self.read_labels, self.filter_loss = LabelReader(compute_loss_func is not None), LossFilter()
        self.card_options: dict[str, Any] = {}
        self.energies, self.head_rates, self.head_fitter = EnergyRecorder(self), HeadRates(self), HeadFitter(self)
        self.evaluations, self.evaluation_sums = Evaluations(), EvaluationSums(self.args)
        own = (self.energies, self.head_rates, FiniteCheck(self), UnusedCheck(self), CheckpointUploads(self))
        for callback in (PerRankSeedCallback(), TrainedHeadCallback(), self.evaluations, self.head_fitter, *own):
            self.add_callback(callback)
        hide_energies(self)
        # What is frozen while train() runs, and how often a batch size was tried in it; which methods of ours it has
        # called, and the parameters that it began with.
        self.frozen, self.attempts, self.reached, self.trainable = ExitStack(), 0, set[str](), set[int]()
        self.batch_maker, self.parts_differ, self.own_optimizer = None, False, None
        self.step_weights = StepWeights(self)
        self.operations: dict[int, int] = {}

    # Trainer has no argument for it. Without it, DDP copies all gradients to a buffer and back in every step.
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True

    # A bare timm model from model_init needs the wrapper too.
    def call_model_init(self, trial: Any = None) -> nn.Module:
        return as_transformers(super().call_model_init(trial))

    @property
    def head_args(self) -> HeadArguments:
        """The heads' options: `args` if it has them, else their defaults."""
        return self.args if isinstance(self.args, HeadArguments) else HeadArguments()

    def entame_config(self) -> EntameConfig:
        """Resolve what is done to the heads, see [`resolve_config`]."""
        return resolve_config(self.entame, self.head_args, self.model)

    def heads(self) -> list[Head]:
        """Find the heads of the model in training."""
        return find_heads(self.model, self.entame_config().head)

    # Trainer resumes from the newest checkpoint, even if it is incomplete or missing on other hosts.
    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        check_output_folder(self.args)
        begin_training(self)
        if resume_from_checkpoint:
            resume_from_checkpoint = same_on_all(partial(find_checkpoint, resume_from_checkpoint, self.args))
            self.provenance = check_provenance(self, resume_from_checkpoint)
        writes = self.args.should_save and self.args.save_strategy != SaveStrategy.NO
        with locked_output_dir(self.args.output_dir, writes), self.frozen:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    # No public hook runs between the loading of the model and the building of the optimizer. And Trainer would resume
    # a stream by drawing the batches that it skips.
    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        prepare_model(self, resume_from_checkpoint)
        self.filter_loss, self.operations = LossFilter(), {}
        place = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        # Trainer would log, evaluate and save when the checkpoint's run did.
        self.state.compute_steps(self.args, max_steps)
        return restore_state(self, resume_from_checkpoint, place)

    # The heads' parameter group must exist before the scheduler reads the groups.
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        ours = self.optimizer is None
        self.reached.add("create_optimizer")
        with explain_optimizer_errors(self.args):
            optimizer: Any = super().create_optimizer(model)
        check_optimizer_options(self.args, optimizer if ours else None)
        self.own_optimizer = optimizer if ours and self.is_in_train else self.own_optimizer
        check_optimizer(self.args, self.accelerator, optimizer)
        self.head_rates.assign(optimizer, ours)
        return optimizer

    # Trainer takes warm-up and decay in steps alone, and some schedules drop options silently.
    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        complete_schedule(self.args)
        with resolve_ratios(self.args, num_training_steps):
            return super().create_scheduler(num_training_steps, optimizer)

    # ---- Data ----

    # Batches are made on the device, where Trainer would collate items. And no example is trained on twice.
    def get_train_dataloader(self) -> DataLoader:
        dataset, args = self.train_dataset, self.args
        if isinstance(dataset, BatchDataset):
            loader, self.batch_maker = prepared_loader(
                *(dataset, self._train_batch_size, self._get_train_sampler(dataset)),
                *(args, self.accelerator, args.dataloader_drop_last),
            )
        else:
            loader, self.batch_maker = super().get_train_dataloader(), None
        share_order(loader, args.seed if args.data_seed is None else args.data_seed)
        self.parts_differ = share_evenly(loader, has_batch_norm(self.model))
        return loader

    # dataloader_drop_last is about training: an evaluation counts every image.
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        sets: Any = self.eval_dataset
        dataset = sets if eval_dataset is None else eval_dataset
        dataset = sets[dataset] if isinstance(dataset, str) else dataset
        self.evaluations.begin(self, dataset, eval_dataset)
        if holds_batches(dataset):
            return self.get_test_dataloader(dataset)
        with temporarily(self.args, dataloader_drop_last=False):
            return count_stream(super().get_eval_dataloader(eval_dataset))

    # As for the evaluation. And images that are trained on are not augmented here.
    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        args, test_dataset = self.args, for_evaluation(test_dataset)
        if isinstance(test_dataset, BatchDataset):
            sampler = self._get_eval_sampler(test_dataset)
            loader, _ = prepared_loader(test_dataset, args.eval_batch_size, sampler, args, self.accelerator)
            return count_stream(loader)
        with temporarily(args, dataloader_drop_last=False):
            return count_stream(super().get_test_dataloader(test_dataset))

    # Weighs micro-batches. A run that was killed after its last checkpoint takes no further step. Neither does the
    # rest of a stream. And accelerate sets the epoch of the sampler alone.
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        if self.batch_maker is not None:
            self.batch_maker.set_epoch(int(self.state.epoch or 0))
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = full_step(batches, self)
        self.step_weights.begin(batches)
        return batches, num_items

    # ---- Step ----

    # The only place that sees a micro-batch's loss, logits and labels together. transformers takes rows of
    # probabilities for multi-label targets. And mixed precision rounds the loss: in bfloat16, ln 10 is 2.297.
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.get("labels")
        if are_shares(labels, self.model) and not isinstance(self.label_smoother, ClassificationLoss):
            self.label_smoother = ClassificationLoss(self.args.label_smoothing_factor)
        with self.energies.watching(), self.head_rates.watching():
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        rounded = loss.dtype.itemsize < 4 or self.accelerator.mixed_precision != "no"
        if self.compute_loss_func is not None or self.label_smoother is not None:
            # The model got no labels and gave no loss, which Trainer expects in front.
            outputs = (loss, *outputs) if isinstance(outputs, tuple) else outputs
        elif rounded and are_classes(labels, self.model):
            loss = ClassificationLoss()(outputs, labels)
        if model.training and self.is_in_train:
            loss = self.step_weights.weigh(loss, {**inputs, "labels": labels})
            self.energies.observe(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    # Head warm-up: after the backward and before clipping. The optimizer skips parameters without gradients, and DDP
    # has reduced them already, so nothing has to be frozen.
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.reached.add("training_step")
        inputs = self.read_labels(inputs, self.model)
        with explained_inputs(self, inputs):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if scales_loss(self) or self.args.logging_nan_inf_filter:
            loss = self.filter_loss(loss)
        if self.accelerator.sync_gradients:
            self.energies.observe_gradients()
            self.head_rates.observe_gradients()
            if self.state.global_step < self.head_args.warmup_steps_of_head():
                drop_gradients(self.model, self.heads())
        if self.batch_maker is not None:
            # The device is busy with the step, and nothing waits for it yet.
            self.batch_maker.prepare()
        return loss

    # Trainer counts the parameters in each step, which walks through all modules twice.
    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        size = main.numel() if isinstance(main, Tensor) else 0
        if size not in self.operations:
            self.operations[size] = super().floating_point_ops(inputs)
        return self.operations[size]

    # ---- Evaluation ----

    # Trainer counts a smaller last batch as a full one, and padding examples too. Here each rank sums the losses of
    # its own examples. All ranks evaluate the buffers that rank 0 saves.
    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        self.head_fitter.refresh_statistics()
        share_buffers(self.model)
        # A metric may run an evaluation itself.
        self.evaluation_sums = sums = EvaluationSums(self.args)
        gathering = temporarily(self, gather_function=sums.gathering(self.gather_function))
        keeping = unchanged_weights(self.model, self.args, self.is_in_train)
        with gathering, keeping, temporarily(self.args, average_tokens_across_devices=False):
            options = (prediction_loss_only, ignore_keys, metric_key_prefix)
            output: Any = super().evaluation_loop(dataloader, description, *options)
        self.read_labels.verify()
        output = sums.correct(output, f"{metric_key_prefix}_loss", self.accelerator)
        output.metrics.update(plain_numbers(output.metrics))
        if metric_key_prefix == "eval" and self.is_world_process_zero():
            self.evaluations.observe(output, self.state, self.heads)
        return output

    # Padding examples of the last batch stay out of the loss. Predictions are padded again before they are gathered,
    # and accelerate drops the padding.
    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        # Other inputs need not have a row an example.
        rows = find_batch_size([inputs.get(getattr(self.model, "main_input_name", "input_ids")), inputs])
        if rows is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self.read_labels(inputs, self.model)
        own = own_rows(rows, self.args, self.accelerator)
        # A rank without examples computes one, so that all ranks gather.
        used = max(own, 1)
        inputs, labels = resize_rows(inputs, rows, used), resize_rows(inputs.get("labels"), rows, own)
        loss, *predicted = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        self.evaluation_sums.add(loss, labels, own, rows)
        logits, label_ids = (resize_rows(values, used, rows) for values in predicted)
        return loss, logits, label_ids

    # Checkpoints keep the log as JSON, which has no arrays. And the device is waited for here anyway.
    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        self.read_labels.verify()
        self.filter_loss.correct(logs)
        logs.update(plain_numbers(logs))
        super().log(logs, start_time)

    # ---- Save and load ----

    # Trainer leaves half of a file on a full disk, and stops at a damaged all_results.json.
    def save_metrics(self, split: str, metrics: dict[str, Any], combined: bool = True) -> None:
        if self.is_world_process_zero():
            save_metrics(Path(self.args.output_dir), split, metrics, combined)

    # As for the metrics.
    def save_state(self) -> None:
        if self.is_world_process_zero():
            write_file(Path(self.args.output_dir, TRAINER_STATE_NAME), lambda file: self.state.save_to_json(str(file)))

    # The libraries' errors on a full disk name neither the disk nor what to do.
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with explained_write_errors(Path(output_dir or self.args.output_dir)):
            super().save_model(output_dir, _internal_call)

    # No public hook gets the state dict that save_model gathers from shards. And Trainer pickles the arguments, with
    # the token in them.
    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if self.args.should_save:
            save_trained(self, Path(output_dir or self.args.output_dir), state_dict)

    # A checkpoint is marked as incomplete until all is written; on_save runs after older ones were removed. And
    # Trainer pushes before other ranks have written their files.
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.head_fitter.refresh_statistics()
        self.read_labels.verify()
        exact = temporarily(self.head_args, save_dtype="float32")
        with written_whole(self, folder), exact, temporarily(self.args, push_to_hub=False, save_total_limit=None):
            super()._save_checkpoint(model, trial)

    # The unfolded head and its statistics need a place in the model before they are loaded; and Trainer does not
    # translate the names of a checkpoint back (ViT). It loads in the middle of train(), where no public hook is.
    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.head_rates.check_resuming(resume_from_checkpoint)
        prepare_resuming(self.model, self.entame_config(), resume_from_checkpoint)
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
        load_trained(self, resume_from_checkpoint, load)

    # The best model is evaluated here, unfolded, with its own statistics: on_train_end would load it a second time.
    def _load_best_model(self) -> None:
        load_trained(self, self.state.best_model_checkpoint, super()._load_best_model)

    # ---- Hub ----

    # Trainer finds out about a read-only token, a missing branch or a public repository after the training.
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        if self.is_world_process_zero():
            args = self.args
            repo = args.hub_model_id or Path(args.output_dir).absolute().name
            private = args.hub_private_repo if private is None else private
            self.hub_model_id = check_push(repo, token or args.hub_token, private, args.hub_revision)
            self.push_in_progress = None

    # Trainer's card does not know what was done to the model, and draws nothing.
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            try_to_write_card(self, *args, **{**self.card_options, **kwargs})

    # Trainer uploads whatever is in the folder, overwrites a card that was edited on the Hub, and does not retry.
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        args = self.args
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        self._finish_current_push()
        private = args.hub_private_repo if private is None else private
        target = HubTarget(self.hub_model_id, token or args.hub_token, revision or args.hub_revision, private)
        write_card = partial(self.create_model_card, **{"model_name": target.repo.rpartition("/")[2], **kwargs})
        return push_folder(target, args.output_dir, str(commit_message), write_card, blocking)
