"""A trainer whose input keeps up with its device."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..data.batches import BatchDataset, batch_loader
from .loss import ClassificationLoss, are_classes, are_shares, check_one_class
from .sampling import count_stream, share_evenly, share_order


class FeedingTrainer(Trainer):
    """A [`Trainer`] that takes whole batches from a [`BatchDataset`], class weights, and labels that are shares.

    Args:
        args, kwargs: what [`Trainer`] takes.
        class_weights (`torch.Tensor`, *optional*): (C,), how much each class counts in the loss; 1 each by default.

    Raises:
        InputError: classes are weighed, and the model's images have several labels each.
    """

    args: Any
    state: Any
    label_smoother: Any

    def __init__(self, *args: Any, class_weights: Tensor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch_maker: Any = None
        self._operations: dict[int, int] = {}
        self.parts_differ = False
        if class_weights is not None:
            check_one_class(self.model)
        if class_weights is not None or self.label_smoother is not None:
            # Trainer's own takes the logarithm in the dtype of the logits.
            self.label_smoother = ClassificationLoss(self.args.label_smoothing_factor, class_weights)

    # Trainer has no argument for it: without it, DDP copies all gradients to what it sends and back in every step.
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.accelerator.ddp_handler is not None:
            self.accelerator.ddp_handler.gradient_as_bucket_view = True

    # Trainer counts the parameters anew in each step, for which it walks through all modules twice.
    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        main = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        size = main.numel() if isinstance(main, Tensor) else 0
        if size not in self._operations:
            self._operations[size] = super().floating_point_ops(inputs)
        return self._operations[size]

    # dataloader_drop_last is about training: dropping images from an evaluation reports another accuracy. Our datasets
    # make their batches on the device, where Trainer's loader would collate items. No example is trained on twice.
    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> DataLoader:
        asked = self.args.dataloader_drop_last
        if isinstance(dataset, BatchDataset):
            sampler = sampler_fn(dataset) if sampler_fn else None
            drop_last, workers = asked and is_training, self.args.dataloader_num_workers
            loader = batch_loader(dataset, batch_size, self.args.device, sampler, drop_last, workers)
            self._batch_maker = loader.collate_fn if is_training else self._batch_maker
            # Each process makes its own batches: the first one has none to hand out. Of other streams it has.
            config = self.accelerator.dataloader_config
            dispatch, config.dispatch_batches = config.dispatch_batches, False
            try:
                loader = self.accelerator.prepare(loader)
            finally:
                config.dispatch_batches = dispatch
        else:
            self.args.dataloader_drop_last = asked and is_training
            try:
                loader = super()._get_dataloader(
                    dataset, description, batch_size, sampler_fn, is_training, dataloader_key
                )
            finally:
                self.args.dataloader_drop_last = asked
        if is_training:
            share_order(loader, self.args.seed if self.args.data_seed is None else self.args.data_seed)
            self.parts_differ = share_evenly(loader)
        else:
            count_stream(loader)
        return loader

    # Trainer takes all of a stream for its first pass, and would begin with the batches of that one again. Another
    # training may be one of another model.
    def _init_training_state(
        self, max_steps: int, steps: int, epochs: int, checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        self._operations = {}
        passes, batches = super()._init_training_state(max_steps, steps, epochs, checkpoint, trial)
        stream = isinstance(self.train_dataset, BatchDataset) and isinstance(self.train_dataset, IterableDataset)
        if checkpoint and stream and batches:
            passes, batches = place_in_stream(checkpoint, self.args.gradient_accumulation_steps)
            self._batch_maker.skip(batches)
        return passes, batches

    # accelerate tells the epoch to the sampler or to the dataset, and to the sampler alone in several processes.
    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        if self._batch_maker is not None:
            self._batch_maker.set_epoch(int(self.state.epoch or 0))
        return super().get_batch_samples(*args, **kwargs)

    # Models take shares of classes for several labels an image. Mixed precision rounds the logits of their own loss,
    # or, on GPUs, where autocast leaves cross-entropy in its input's, its logarithms: in bfloat16, ln 10 is 2.297.
    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        labels: Any = inputs.get("labels")
        if are_shares(labels, self.model) and not isinstance(self.label_smoother, ClassificationLoss):
            self.label_smoother = ClassificationLoss(self.args.label_smoothing_factor)
        loss, outputs = super().compute_loss(model, inputs, True, *args, **kwargs)
        rounded = loss.dtype.itemsize < 4 or self.accelerator.mixed_precision != "no"
        own = self.compute_loss_func is None and self.label_smoother is None
        if rounded and own and are_classes(labels, self.model):
            loss = ClassificationLoss()(outputs, labels)
        return (loss, outputs) if return_outputs else loss

    # The device is busy after a step was given to it, and nothing waits for it yet.
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self._batch_maker is not None:
            self._batch_maker.prepare()
        return loss


def place_in_stream(checkpoint: str, accumulation: int) -> tuple[int, int]:
    """Tell which pass over a stream a run was in, and after which of its batches.

    Args:
        checkpoint (`str`): a checkpoint of the run.
        accumulation (`int`): batches a step.

    Returns:
        `tuple[int, int]`: passes that had ended, and batches of the one that had not.
    """
    state = TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME)))
    # As Trainer counts: whole passes, and batches of this one over those of the run.
    epoch = state.epoch or 0.0
    passes = max(math.ceil(epoch) - 1, 0)
    return passes, round((epoch - passes) * state.max_steps * accumulation)
