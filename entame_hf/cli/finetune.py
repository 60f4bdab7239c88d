"""Fine-tune an image classifier with ENTAME.

entame finetune --model_name_or_path timm/resnet50.a1_in1k --data_dir photos --output_dir out
entame finetune out/run.yaml --resume_from_checkpoint last
"""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from ..data import Splits
from ..errors import InputError
from ..trainer import locked_output_dir, set_log_level, zero3_init_disabled
from .arguments import WITHOUT_EFFECT, ModelArguments, RunArguments, check_given
from .console import say
from .data_arguments import DataArguments
from .launch import options_named
from .model import load_classifier
from .options import OptionParser
from .output_folder import check_output_dir, given_for_run, last_checkpoint
from .training import build_trainer, prepare_data, run

INPUTS = ("model_name_or_path", "dataset_name", "data_dir")


def main(argv: list[str]) -> None:
    """Run `entame finetune`."""
    parser = training_parser("Fine-tune an image classifier with ENTAME.")
    with options_named(parser.named):
        given = given_for_run(parser, argv)
        if given.get("inspect"):
            from .inspect import inspect

            inspect(parser, given)
        else:
            finetune(parser, given)


def training_parser(description: str) -> OptionParser:
    """Build the parser of `finetune`, `inspect` and `demo`."""
    return OptionParser([ModelArguments, DataArguments, RunArguments], description, without=WITHOUT_EFFECT)


def finetune(parser: OptionParser, given: dict[str, Any]) -> None:
    """Fine-tune a model as the given options say."""
    model_args, data_args, args = parser.build(given)
    check_given(model_args, data_args, args)
    set_up(args)
    check_output_dir(args, *(given.get(name) for name in INPUTS))
    # Until the end, and before anything of an older run is removed.
    with locked_output_dir(str(args.output_dir), args.should_save):
        args.resume_from_checkpoint = last_checkpoint(args)
        splits = load_data(model_args, data_args, args)
        model, data = load(splits, model_args, data_args, args)
        trainer = build_trainer(model, data, args, given, data_args.loss_weights(data.train))
        trainer.card_options = {
            "dataset_tags": data_args.dataset_name,
            "dataset_args": data_args.dataset_config_name,
            "dataset": data_args.data_dir,
        }
        run(trainer, data.test, splits)


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
    check_classes(model_args, splits)
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


def check_classes(model_args: ModelArguments, splits: Splits) -> None:
    """Refuse data with another number of classes than expected."""
    found = len(splits.class_names)
    if model_args.num_labels not in (None, found):
        raise InputError(f"`num_labels={model_args.num_labels}`, but the data has {found} classes. Leave it out.")
