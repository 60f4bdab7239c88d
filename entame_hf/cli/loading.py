"""What `finetune`, `inspect` and `demo` share: their options, and how models and data are loaded."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from ..data import Splits
from ..errors import InputError
from ..trainer import set_log_level, zero3_init_disabled
from .arguments import WITHOUT_EFFECT, ModelArguments, RunArguments
from .console import say
from .data_arguments import DataArguments
from .model import load_classifier
from .options import OptionParser
from .training import prepare_data

INPUTS = ("model_name_or_path", "dataset_name", "data_dir")


def training_parser(description: str) -> OptionParser:
    """Build the parser of `finetune`, `inspect` and `demo`."""
    return OptionParser([ModelArguments, DataArguments, RunArguments], description, without=WITHOUT_EFFECT)


def set_up(args: RunArguments) -> None:
    """Set what belongs to the process."""
    logging.set_verbosity(args.get_process_log_level())
    set_log_level(args)
    # Pinning serves accelerators, and warns without one.
    args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"


def load_data(model_args: ModelArguments, data_args: DataArguments, args: RunArguments) -> Splits:
    """Load the images of a run, and say how they were understood."""
    with args.main_process_first(desc="loading the data"):
        splits = data_args.load(args.seed, model_args.num_labels)
    if args.process_index == 0:
        say(splits.describe())
    found = len(splits.class_names)
    if model_args.num_labels not in (None, found):
        raise InputError(f"`num_labels={model_args.num_labels}`, but the data has {found} classes. Leave it out.")
    return splits


def load(splits: Splits, model_args: ModelArguments, data_args: DataArguments, args: RunArguments) -> tuple[Any, Any]:
    """Load the model of a run, and build its datasets."""
    with zero3_init_disabled(args):
        model, processor = load_classifier(
            str(model_args.model_name_or_path),
            splits.class_names,
            revision=model_args.model_revision,
            trust_remote_code=model_args.trust_remote_code,
            keeps_head=args.entame_method == "keep",
        )
    return model, prepare_data(model, processor, splits, model_args, data_args, args)
