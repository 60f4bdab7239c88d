"""A run from its model and data to the files that it leaves: shared by `finetune` and `demo`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    BaseImageProcessor,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
)

from ..data import (
    BuiltDatasets,
    Splits,
    build_datasets,
    output_size,
    set_image_size,
)
from ..errors import InputError
from ..metrics import metrics_of_predictions, predicted_classes
from ..trainer import EntameTrainer, check_finite, locked_output_dir
from .app import check_app, write_app
from .arguments import ModelArguments, RunArguments
from .console import Console, Patience, say
from .data_arguments import DataArguments
from .model import check_input_size
from .output_folder import ClaimFolder
from .report import draw_batch, introduction, report_images, summary, what_to_type


def prepare_data(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    splits: Splits,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
) -> BuiltDatasets:
    """Build the datasets for a model, in the size and with the normalisation that the options ask for."""
    try:
        if model_args.image_size is not None:
            processor = set_image_size(processor, model_args.image_size)
        size = output_size(processor)
    except InputError:
        raise
    # Settings of another type than the processor's own code expects.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"The image processor of `model_name_or_path={model_args.model_name_or_path}` cannot be used: {error}. "
            "Repair its preprocessor_config.json."
        ) from error
    check_input_size(model, size)
    return build_datasets(
        splits,
        processor,
        **data_args.build_options(args.seed),
        own_statistics=model_args.normalization == "dataset",
    )


def build_trainer(
    model: PreTrainedModel,
    data: BuiltDatasets,
    args: RunArguments,
    class_weights: Tensor | None = None,
) -> EntameTrainer:
    """Build the trainer of a run."""
    try:
        trainer = EntameTrainer(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.validation,
            processing_class=data.processor,
            compute_metrics=metrics_of_predictions(),
            preprocess_logits_for_metrics=predicted_classes,
            class_weights=class_weights,
        )
    # Options that do not go together.
    except (ImportError, RuntimeError, ValueError) as error:
        raise InputError(str(error)) from error
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Console())
    if args.patience is not None:
        trainer.add_callback(Patience(args.patience))
    return trainer


def train_and_save(
    trainer: EntameTrainer, options: dict[str, Any], test: Any = None, *, introduces: bool = False
) -> dict[str, dict[str, float]]:
    """Train, evaluate, and write model, metrics, card and the options that were given."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    claim = ClaimFolder(folder, options)
    trainer.add_callback(claim)
    draw = partial(draw_batch, trainer)
    with locked_output_dir(folder, args.should_save), claim.batch_shown(draw) as batch_file:
        if introduces and trainer.is_world_process_zero():
            say(introduction(trainer, batch_file))
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        # Stops a run that lost too many images in its only epoch.
        train: Any = trainer.train_dataset
        train.gather_unreadable()
        found = {"train": result.metrics, "eval": trainer.evaluate()}
        check_finite(trainer.model, args, trainer.state, {"eval_loss": found["eval"]["eval_loss"]})
        # Internal, that is without pushing: that comes last, with the metrics.
        trainer.save_model(_internal_call=True)
        if test is not None:
            found["test"] = trainer.evaluate(test, metric_key_prefix="test")
        for split, metrics in found.items():
            trainer.save_metrics(split, metrics)
        trainer.save_state()
        trainer.create_model_card()
    return found


def run(trainer: EntameTrainer, options: dict[str, Any], test: Any, splits: Splits) -> None:
    """Train and save, say what was made, and push it where that was asked for."""
    args, folder = trainer.args, Path(trainer.args.output_dir)
    start, is_first = time.monotonic(), trainer.is_world_process_zero()
    repository = trainer.hub_model_id if args.push_to_hub else None
    if args.gradio:
        check_app(folder, repository)
    try:
        found = train_and_save(trainer, options, test, introduces=True)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(what_to_type(trainer)) from stop
    if args.gradio and is_first:
        write_app(folder, repository)
    data: dict[str, Any] = {"train": trainer.train_dataset, "validation": trainer.eval_dataset, "test": test}
    data = {name: part for name, part in data.items() if part is not None}
    for part in data.values():
        part.gather_unreadable()
    if is_first:
        report_images(folder, data, splits)
        print(summary(trainer, found, time.monotonic() - start))
    if args.push_to_hub:
        commit = trainer.push_to_hub()
        if commit is not None:
            print(f"Pushed: {commit.commit_url}")
