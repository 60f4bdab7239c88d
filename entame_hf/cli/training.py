"""A run from its model and data to the files that it leaves: shared by `finetune` and `demo`."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    BaseImageProcessor,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TimmWrapperImageProcessor,
)

from ..data import BuiltDatasets, Splits, build_datasets, output_size, set_image_size, update_pretrained_cfg
from ..errors import InputError
from ..metrics import metrics_of_predictions, predicted_classes
from ..trainer import EntameTrainer
from .app import write_app
from .arguments import ModelArguments, RunArguments
from .console import Console, Patience, best_evaluation, duration, scores
from .data_arguments import DataArguments
from .model import check_input_size
from .output_folder import RUN_FILE, ClaimFolder, save_results, save_state


def prepare_data(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    splits: Splits,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
) -> BuiltDatasets:
    """Build the datasets for a model, in the size and with the normalisation that the options ask for.

    Raises:
        InputError: the image processor or the model does not take that size.
    """
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
    built = build_datasets(
        splits,
        processor,
        **data_args.build_options(args.seed),
        own_statistics=model_args.normalization == "dataset",
    )
    if isinstance(built.processor, TimmWrapperImageProcessor):
        # Where timm and transformers look for a timm model's mean, std, size and crop.
        model.config.pretrained_cfg = update_pretrained_cfg(model.config.pretrained_cfg, built.processor)
    return built


def build_trainer(
    model: PreTrainedModel,
    data: BuiltDatasets,
    args: RunArguments,
    options: dict[str, Any],
    class_weights: Tensor | None = None,
) -> EntameTrainer:
    """Build the trainer of a run.

    Args:
        model (`PreTrainedModel`): the classifier.
        data ([`BuiltDatasets`]): what it trains and evaluates on.
        args ([`RunArguments`]): the run's.
        options (`dict`): what the run was told, for its `run.yaml`.
        class_weights (`torch.Tensor`, *optional*): (C,), how much each class counts in the loss.

    Raises:
        InputError: options do not go together.
    """
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
    trainer.add_callback(ClaimFolder(options))
    if args.patience is not None:
        trainer.add_callback(Patience(args.patience))
    return trainer


def train_and_save(trainer: EntameTrainer, test: Any = None) -> dict[str, dict[str, float]]:
    """Train, evaluate what is saved, and write model, metrics and card.

    Args:
        trainer ([`EntameTrainer`]): see [`build_trainer`].
        test (dataset, *optional*): evaluated once, at the end.

    Returns:
        `dict`: the metrics of the saved weights by split: train, eval and test.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    # Internal, that is without pushing: that comes last, with the metrics.
    trainer.save_model(_internal_call=True)
    found = {"train": result.metrics, "eval": trainer.evaluate()}
    if test is not None:
        found["test"] = trainer.evaluate(test, metric_key_prefix="test")
    if trainer.is_world_process_zero():
        for split, metrics in found.items():
            save_results(folder, split, metrics)
        save_state(folder, trainer.state)
    trainer.create_model_card()
    return found


def run(trainer: EntameTrainer, test: Any = None) -> None:
    """Train and save, say what was made, and push it where that was asked for.

    Args:
        trainer ([`EntameTrainer`]): see [`build_trainer`].
        test (dataset, *optional*): evaluated once, at the end.
    """
    args, folder = trainer.args, Path(trainer.args.output_dir)
    start, is_first = time.monotonic(), trainer.is_world_process_zero()
    try:
        found = train_and_save(trainer, test)
    except KeyboardInterrupt:
        if is_first:
            print(f"\nInterrupted. Resume with: {resume_command(folder)}", file=sys.stderr)
        raise
    if args.gradio and is_first:
        write_app(folder, trainer.hub_model_id if args.push_to_hub else None)
    datasets: dict[str, Any] = {"train": trainer.train_dataset, "validation": trainer.eval_dataset, "test": test}
    for name, dataset in datasets.items():
        if dataset is not None:
            dataset.gather_unreadable()
            if is_first and (line := dataset.summary()):
                print(f"{name}: {line}")
    if is_first:
        print(summary(trainer, found, time.monotonic() - start))
    if args.push_to_hub:
        commit = trainer.push_to_hub()
        if commit is not None:
            print(f"Pushed: {commit.commit_url}")


def summary(trainer: EntameTrainer, found: dict[str, dict[str, float]], seconds: float) -> str:
    """Say what a run made, how good it is, and what to type next."""
    args, state, folder = trainer.args, trainer.state, str(trainer.args.output_dir)
    best = best_evaluation(state.log_history, args)
    weights = f"the last ones, of step {state.global_step:,}"
    if args.load_best_model_at_end and best:
        weights = f"the best ones, of epoch {best['epoch']:.4g} (step {best['step']:,})"
    lines = [
        f"\nDone in {duration(seconds)}: {state.global_step:,} steps, {state.epoch or 0:.4g} epochs.",
        f"  model       {folder}",
        f"  weights     {weights}",
        f"  validation  {scores(found['eval'])}",
    ]
    if "test" in found:
        lines.append(f"  test        {scores(found['test'], 'test_')}")
    path = shlex.quote(folder)
    lines += [
        f"  card        {folder}/README.md",
        f'  load        AutoModelForImageClassification.from_pretrained("{folder}")',
        f"  predict     entame predict {path} FOLDER --output predictions.csv",
    ]
    if args.save_strategy != "no":
        lines.append(f"  continue    {resume_command(Path(folder))} --num_train_epochs {2 * round(state.epoch or 1)}")
    return "\n".join(lines)


def resume_command(folder: Path) -> str:
    """Write the command that resumes the run of a folder."""
    return f"entame finetune {shlex.quote(str(folder / RUN_FILE))} --resume_from_checkpoint last"
