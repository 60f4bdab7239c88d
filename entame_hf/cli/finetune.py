"""Fine-tune an image classifier with ENTAME.

entame finetune --model_name_or_path timm/resnet50.a1_in1k --data_dir photos --output_dir out
entame finetune out/run.yaml --resume_from_checkpoint last
"""

from __future__ import annotations

from typing import Any

from ..trainer import locked_output_dir
from .arguments import check_given
from .inspect import inspect
from .launch import options_named
from .loading import INPUTS, load, load_data, set_up, training_parser
from .options import OptionParser
from .output_folder import check_output_dir, given_for_run, last_checkpoint
from .training import build_trainer, run


def main(argv: list[str]) -> None:
    """Run `entame finetune`."""
    parser = training_parser("Fine-tune an image classifier with ENTAME.")
    with options_named(parser.named):
        given = given_for_run(parser, argv)
        if given.get("inspect"):
            inspect(parser, given)
        else:
            finetune(parser, given)


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
        trainer = build_trainer(model, data, args, data_args.loss_weights(data.train))
        trainer.card_options = {
            "dataset_tags": data_args.dataset_name,
            "dataset_args": data_args.dataset_config_name,
            "dataset": data_args.data_dir,
        }
        run(trainer, given, data.test, splits)
