"""The options of a run, beside those of its data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_utils import SchedulerType

from ..data import default_workers
from ..errors import InputError, unknown_value
from ..metrics import MEASURED
from ..training_args import BOUNDS, EntameTrainingArguments, check_numbers, option

METRICS = ("loss", *MEASURED)

SCHEDULES = [kind.value for kind in SchedulerType]

# Options of `TrainingArguments` that do nothing for image classifiers here, or that break them.
WITHOUT_EFFECT = (
    "average_tokens_across_devices",
    "batch_eval_metrics",
    "dataloader_in_order",
    "dataloader_multiprocessing_context",
    "dataloader_persistent_workers",
    "dataloader_prefetch_factor",
    "do_eval",
    "do_predict",
    "do_train",
    "eval_do_concat_batches",
    "eval_use_gather_object",
    "include_for_metrics",
    "include_num_input_tokens_seen",
    "label_names",
    "length_column_name",
    "liger_kernel_config",
    "local_rank",
    "neftune_noise_alpha",
    "optim_target_modules",
    "parallelism_config",
    "prediction_loss_only",
    "remove_unused_columns",
    "use_cache",
    "use_liger_kernel",
)

# Where a tracker's package, or what it installs, is called otherwise.
_PACKAGES = {"azure_ml": "azureml-core", "flyte": "flytekit"}

_MODULES = {"azure_ml": ("azureml",), "flyte": ("flytekit",), "tensorboard": ("tensorboard", "tensorboardX")}


@dataclass
class ModelArguments:
    """Say which model is fine-tuned and what its images look like."""

    model_name_or_path: str | None = option(None, "Id on the Hub (timm/... too), or a local folder.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the Hub.")
    trust_remote_code: bool = option(False, "Run code that the model's repository holds.")
    image_size: int | None = option(None, "Side of the square images in pixels; default: the model's.")
    normalization: str = option(
        "model", "Mean and std of the images: the model's, or the training split's.", "model", "dataset"
    )
    num_labels: int | None = option(None, "Stop unless the data has this many classes.")


@dataclass(repr=False)
class RunArguments(EntameTrainingArguments):
    """Set up the run: batches of 64 and 10 epochs as in the paper, evaluated and saved after each."""

    output_dir: str = option("out", "Folder of the run: model, card, checkpoints, run.yaml.")
    patience: int | None = option(None, "Stop after this many evaluations without improvement.")
    resume_from_checkpoint: str | None = option(None, "last, or the folder of a checkpoint.")
    overwrite: bool = option(False, "Replace the run that output_dir holds.")
    inspect: bool = option(False, "Show the first step of each method and stop, as `entame inspect`.")
    gradio: bool = option(False, "Write app.py, a Gradio demo for a Space.")

    num_train_epochs: float = option(10, "Passes over the training split.")
    max_steps: int = option(-1, "Stop after this many optimizer steps, whatever num_train_epochs.")
    per_device_train_batch_size: int = option(64, "Images per step and device.")
    per_device_eval_batch_size: int = option(64, "Images per step and device in evaluation.")
    gradient_accumulation_steps: int = option(1, "Batches per optimizer step.")
    learning_rate: float = option(1e-4, "Peak learning rate.")
    lr_scheduler_type: str | None = option(None, "Schedule; default: the recipe's, constant in paper.", *SCHEDULES)
    warmup_steps: float | None = option(
        None, "Warm-up in steps, or a fraction of them below 1; default: the recipe's."
    )
    weight_decay: float = option(0.0, "Weight decay, not of biases and norms.")
    label_smoothing_factor: float = option(0.0, "Label smoothing.")
    bf16: bool = option(False, "Mixed precision in bfloat16.")
    torch_compile: bool = option(False, "Compile the model.")
    eval_strategy: str | None = option(  # type: ignore[assignment]
        None, "When to evaluate; default: steps with eval_steps, else epoch.", "no", "steps", "epoch"
    )
    eval_steps: float | None = option(None, "Steps between evaluations; default: logging_steps.")
    save_strategy: str | None = option(  # type: ignore[assignment]
        None, "When to save a checkpoint; default: at each evaluation.", "no", "steps", "epoch", "best"
    )
    save_steps: float | None = option(None, "Steps between checkpoints; default: eval_steps.")  # type: ignore[assignment]
    save_total_limit: int | None = option(2, "Checkpoints that are kept, the best one among them.")
    load_best_model_at_end: bool | None = option(  # type: ignore[assignment]
        None, "Keep the best weights, not the last; default: where evaluations are saved."
    )
    metric_for_best_model: str | None = option(None, "What best means; default: accuracy.", *METRICS)
    logging_steps: float = option(10, "Steps between two lines of the log.")
    report_to: list[str] | None = field(
        default=None, metadata={"help": "Trackers, such as tensorboard, trackio, wandb."}
    )
    seed: int = option(42, "Random seed of head, order and augmentation.")
    use_cpu: bool = option(False, "Train on the CPU where there is a GPU.")
    dataloader_num_workers: int = field(
        default_factory=default_workers,
        metadata={"help": "Processes that decode images; default: seven for eight cores."},
    )
    push_to_hub: bool = option(False, "Push model and card to the Hub.")
    hub_model_id: str | None = option(None, "Repository to push to; default: the folder's name.")

    def __post_init__(self) -> None:
        self.report_to = self.report_to or ["none"]
        _check_trackers(self.report_to)
        check_numbers(self, {**BOUNDS, "patience": (1, math.inf)})
        self._follow_evaluations()
        metric = (self.metric_for_best_model or "loss").removeprefix("eval_")
        if metric not in METRICS:
            raise ValueError(f"`metric_for_best_model={metric}` is not measured: use {', '.join(METRICS)}.")
        super().__post_init__()
        # Some trackers are set up again for the evaluation after a training, and know a run by its name.
        self.run_name = self.run_name or f"{Path(str(self.output_dir)).name}-{datetime.now():%Y%m%d-%H%M%S}"

    def _follow_evaluations(self) -> None:
        """Save with each evaluation and keep the best weights, unless the options say otherwise."""
        if self.eval_strategy is None:
            self.eval_strategy = "epoch" if self.eval_steps is None else "steps"
        evaluates = self.eval_strategy != "no"
        if self.patience is not None and not evaluates:
            raise ValueError(
                f"`patience={self.patience}` counts evaluations, and there are none. Use `eval_strategy=epoch`."
            )
        if self.eval_strategy == "steps" and not self.eval_steps:
            self.eval_steps = self.logging_steps
        if self.save_strategy is None and self.save_steps is None:
            self.save_strategy = self.eval_strategy if evaluates else "epoch"
        elif self.save_strategy is None:
            self.save_strategy = "steps"
        if self.save_steps is None:
            self.save_steps = self.eval_steps if self.eval_strategy == "steps" else 500
        if self.load_best_model_at_end is None:
            together = self.eval_strategy == self.save_strategy
            if together and self.eval_strategy == "steps":
                save, evaluate = float(self.save_steps or 0), float(self.eval_steps or 0)
                together = save == evaluate or (min(save, evaluate) >= 1 and save % evaluate == 0)
            self.load_best_model_at_end = evaluates and (together or self.save_strategy == "best")
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.patience):
            self.metric_for_best_model = "accuracy"


def _check_trackers(names: list[str]) -> None:
    """Refuse a tracker that is unknown, or whose package is not installed."""
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            raise InputError(unknown_value("`report_to`:", name, ["none", "all", *sorted(INTEGRATION_TO_CALLBACK)]))
        modules = _MODULES.get(name, (name,))
        if not any(find_spec(module) for module in modules):
            package = _PACKAGES.get(name, name)
            raise ValueError(f"`report_to={name}` needs the package {package}: pip install {package}")


def check_given(model: ModelArguments, data: Any, run: RunArguments) -> None:
    """Refuse a run without a model or without data."""
    if model.model_name_or_path is None:
        raise InputError(
            "No model. Give `model_name_or_path`, such as timm/resnet50.a1_in1k; `entame demo` needs neither model "
            "nor data."
        )
    if data.dataset_name is None and data.data_dir is None:
        raise InputError(
            "No data. Give `data_dir` (folders of images) or `dataset_name` (an id on the Hub or a folder)."
        )
    if data.streaming and run.max_steps <= 0:
        raise InputError("`streaming` needs `max_steps`: the number of batches in a stream is not known.")
