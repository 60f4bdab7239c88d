"""Feed a run: loaders of batches that are made ahead, and micro-batches of different sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers import TrainingArguments, default_data_collator
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..data import BatchDataset, BatchLoader, batch_loader, to_device
from ..errors import InputError
from ..heads import Head, base_model, num_classes, num_features
from ..metrics import IGNORED_LABEL
from ..patch import BATCH_NORMS, frozen_statistics

logger = logging.get_logger(__name__)


@contextmanager
def temporarily(target: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object while this context lasts."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


def collate(examples: list[Any]) -> dict[str, Any]:
    """Collate examples as Trainer does by default; so are pairs of an image and its class, as torchvision gives."""
    if isinstance(examples[0], tuple) and len(examples[0]) == 2:
        examples = [{"pixel_values": image, "labels": label} for image, label in examples]
    return default_data_collator(examples)


def prepared_loader(
    dataset: BatchDataset,
    batch_size: int,
    sampler: Sampler | None,
    args: TrainingArguments,
    accelerator: Accelerator,
    drop_last: bool = False,
) -> tuple[DataLoader, Any]:
    """Build a loader of whole batches, made on the device, and prepare it; return what makes its batches too."""
    # What a former evaluation could not read.
    dataset.gather_unreadable()
    loader = batch_loader(dataset, batch_size, args.device, sampler, drop_last, args.dataloader_num_workers)
    maker = loader.collate_fn
    # Each process makes its own batches: the first one has none to hand out. Other streams keep the setting.
    with temporarily(accelerator.dataloader_config, dispatch_batches=False):
        prepared = accelerator.prepare(loader)
    # accelerate builds a plain one of the same settings.
    if type(prepared.base_dataloader) is DataLoader:
        prepared.base_dataloader.__class__ = BatchLoader
    return prepared, maker


def forget_loader(loader: Any, accelerator: Accelerator) -> None:
    """Let a prepared loader go, which accelerate would keep with its processes for as long as it lives."""
    accelerator._dataloaders[:] = [each for each in accelerator._dataloaders if each is not loader]


class StepWeights:
    """Weigh the micro-batches of a step by what their losses are means over, in all processes.

    These are examples, or labels where some may be -100: a step's loss is the same however it is split.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        # Per micro-batch; None if all have the same.
        self._mean: Any = None

    def begin(self, batches: Sequence[Any]) -> None:
        """Count the micro-batches of the next step."""
        accelerator, counts = self.trainer.accelerator, [self._count(batch) for batch in batches]
        # At the end of an epoch, processes may have parts of different sizes.
        parts_differ = self.trainer.parts_differ and accelerator.gradient_state.end_of_dataloader
        if any(isinstance(count, Tensor) for count in counts):
            parts_differ = accelerator.num_processes > 1
            mean = torch.stack([torch.as_tensor(count, device=accelerator.device) for count in counts]).double().mean()
            self._mean = mean if parts_differ or len(counts) > 1 else None
        elif parts_differ and counts:
            mean = torch.tensor(sum(counts) / len(counts), dtype=torch.float64)
            self._mean = to_device(mean, accelerator.device)
        else:
            self._mean = sum(counts) / len(counts) if len(set(counts)) > 1 else None
        if parts_differ and counts:
            self._mean = accelerator.reduce(self._mean, "mean")

    def weigh(self, loss: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Weigh the loss of a micro-batch. One without labels adds nothing to a step that has some."""
        # A function of the user's own is called by CustomLoss.
        if self._mean is None or self.trainer.compute_loss_func is not None:
            return loss
        weight = self._count(inputs) / self._mean
        return torch.where(weight == 0, 0.0, loss * weight.to(loss)) if isinstance(weight, Tensor) else loss * weight

    def _count(self, batch: Any) -> Any:
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        # No label of a BatchDataset's is -100 in training.
        if self.trainer.batch_maker is not None or not isinstance(labels, Tensor) or labels.is_floating_point():
            return find_batch_size(batch) or 0
        # Where they are: the host would wait for a number.
        return (labels != IGNORED_LABEL).sum()


def full_step(batches: list[Any], trainer: Any) -> list[Any]:
    """Leave out the micro-batches at the end of a stream that do not fill an optimizer step.

    Trainer would add their gradient to the first step of the next pass.

    Raises:
        InputError: the stream fills no step, or not one batch.
    """
    args, dataset = trainer.args, trainer.train_dataset
    number = args.gradient_accumulation_steps
    if len(batches) == number or not isinstance(dataset, IterableDataset) or has_length(dataset):
        return batches
    if trainer.state.global_step == 0:
        if batches:
            raise InputError(
                f"The stream has fewer batches ({len(batches)}) than a step takes. Set "
                f"`gradient_accumulation_steps={len(batches)}` at most, or a smaller `per_device_train_batch_size`."
            )
        # Trainer would end here, as if it had trained.
        raise InputError(
            f"The stream fills no batch of {args.per_device_train_batch_size}. Set a smaller "
            "`per_device_train_batch_size`, or `dataloader_drop_last=False`."
        )
    if batches:
        logger.warning_once(
            f"A pass over the stream ends within a step of {number} batches: its last {len(batches)} are left out."
        )
    return []


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether a model normalises by the statistics of a batch, of which one value a channel has none."""
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


@contextmanager
def explained_inputs(trainer: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """Say in one line why a model cannot train on a micro-batch, where the libraries speak of tensors.

    It has no labels, or inputs that the model does not take; BatchNorm has one value a channel; or a head takes
    another number of features. The last batch of a stream cannot join the one before it: one image is normalised by
    the running statistics.
    """
    model, args, rows = trainer.model, trainer.args, find_batch_size(inputs)
    if "labels" not in inputs and trainer.label_names == ["labels"] and trainer.compute_loss_func is None:
        raise InputError(
            f"The batches have no labels, only {', '.join(inputs) or 'nothing'}. Give each example the index of its "
            "class, an integer, as `labels`: text and None are dropped when examples are collated."
        )
    stream = isinstance(trainer.train_dataset, IterableDataset)
    if rows == 1 and stream and args.per_device_train_batch_size > 1 and has_batch_norm(model):
        logger.warning_once("The last batch of the stream has one image: BatchNorm uses its running statistics.")
        with frozen_statistics(model):
            yield
        return
    try:
        yield
    except TypeError as error:
        name = next((name for name in inputs if f"unexpected keyword argument '{name}'" in str(error)), None)
        if name is None:
            raise
        raise InputError(
            f"The batches have `{name}`, which this {type(base_model(model)).__name__} does not take. Leave it out of "
            "the examples, or set `remove_unused_columns=True`."
        ) from error
    except (RuntimeError, ValueError) as error:
        if "Expected more than 1 value per channel" in str(error):
            raise InputError(
                f"A batch of {rows} image is too small for BatchNorm, which needs two values a channel. Set "
                "`per_device_train_batch_size=2` or more, `dataloader_drop_last=True`, or `freeze_statistics=True`."
            ) from error
        for path, takes, gets in _head_widths(model, trainer.heads(), inputs):
            if takes != gets:
                raise InputError(
                    f"`{path}` takes {takes} features, and the model gives it {gets}. Replace it by a layer of "
                    f"{gets} features, such as torch.nn.Linear({gets}, {num_classes(model.get_submodule(path))})."
                ) from error
        raise


def _head_widths(model: nn.Module, heads: list[Head], inputs: dict[str, Any]) -> list[tuple[str, int, int]]:
    """List the path of each head that a forward reaches, the features that it takes, and those that it gets."""
    widths: list[tuple[str, int, int]] = []

    def note(path: str, module: Any, arguments: tuple[Any, ...]) -> None:
        dimension = -1 if isinstance(module, nn.Linear) else 1
        widths.append((path, num_features(module), arguments[0].shape[dimension]))

    with ExitStack() as hooks, torch.no_grad(), suppress(RuntimeError, ValueError):
        for head in heads:
            hooks.enter_context(head.module.register_forward_pre_hook(partial(note, head.path)))
        model(**inputs)
    return widths
