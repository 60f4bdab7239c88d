"""Feed a run: loaders of batches that are made ahead, and micro-batches of different sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, IterableDataset, Sampler
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.utils import logging

from ..data import BatchDataset, batch_loader, to_device
from ..errors import InputError
from ..patch import frozen_statistics
from .temporary import temporarily

logger = logging.get_logger(__name__)


def prepared_loader(
    dataset: BatchDataset,
    batch_size: int,
    sampler: Sampler | None,
    args: TrainingArguments,
    accelerator: Accelerator,
    drop_last: bool = False,
) -> tuple[DataLoader, Any]:
    """Build a loader of whole batches, which are made on the device, and prepare it with accelerate.

    Args:
        dataset ([`BatchDataset`]): the images.
        batch_size (`int`): images a batch and process.
        sampler (`torch.utils.data.Sampler`, *optional*): the order; `None` for streams.
        args (`TrainingArguments`): the device and the number of workers are read.
        accelerator ([`~accelerate.Accelerator`]): the trainer's.
        drop_last (`bool`, *optional*, defaults to `False`): whether a smaller last batch is left out.

    Returns:
        The loader, and what makes its batches.
    """
    # What a former evaluation could not read.
    dataset.gather_unreadable()
    loader = batch_loader(dataset, batch_size, args.device, sampler, drop_last, args.dataloader_num_workers)
    maker = loader.collate_fn
    # Each process makes its own batches: the first one has none to hand out. Other streams keep the setting.
    with temporarily(accelerator.dataloader_config, dispatch_batches=False):
        return accelerator.prepare(loader), maker


def is_batch_stream(dataset: Any) -> bool:
    """Tell whether a dataset gives whole batches and has no row numbers."""
    return isinstance(dataset, BatchDataset) and isinstance(dataset, IterableDataset)


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


def mean_batch_size(batches: Sequence[Any], accelerator: Accelerator, parts_differ: bool) -> Any:
    """Compute the mean number of examples of a step's micro-batches, if they differ.

    Args:
        batches (`Sequence`): the step's micro-batches of this process.
        accelerator ([`~accelerate.Accelerator`]): the trainer's.
        parts_differ (`bool`): whether processes may have parts of different sizes at the end of this epoch.

    Returns:
        `float` or `torch.Tensor`, over all processes; `None` if all micro-batches have the same size.
    """
    sizes = [find_batch_size(batch) or 0 for batch in batches]
    if not sizes:
        return None
    parts_differ = parts_differ and accelerator.gradient_state.end_of_dataloader
    if not parts_differ and len(set(sizes)) <= 1:
        return None
    mean = sum(sizes) / len(sizes)
    if not parts_differ:
        return mean
    return accelerator.reduce(to_device(torch.tensor(mean, dtype=torch.float64), accelerator.device), "mean")


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether a model normalises by the statistics of a batch, of which one value a channel has none."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


@contextmanager
def single_image_explained(
    model: nn.Module, rows: int | None, args: TrainingArguments, stream: bool
) -> Iterator[None]:
    """Let a micro-batch of one image pass BatchNorm, or say what to set.

    The last batch of a stream cannot join the one before it. It is normalised by the running statistics.

    Args:
        model (`torch.nn.Module`): the model in training.
        rows (`int`, *optional*): images of the micro-batch.
        args (`TrainingArguments`): the batch size is read.
        stream (`bool`): whether the micro-batch is of a stream.

    Raises:
        InputError: BatchNorm has one value a channel, because all batches have one image.
    """
    if rows == 1 and stream and args.per_device_train_batch_size > 1 and has_batch_norm(model):
        logger.warning_once("The last batch of the stream has one image: BatchNorm uses its running statistics.")
        with frozen_statistics(model):
            yield
        return
    try:
        yield
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):
            raise
        raise InputError(
            f"A batch of {rows} image is too small for BatchNorm, which needs two values a channel. Set "
            "per_device_train_batch_size=2 or more, dataloader_drop_last=True, or freeze_statistics=True."
        ) from error
