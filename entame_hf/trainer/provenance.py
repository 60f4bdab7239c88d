"""What a checkpoint was trained on and with, so that a run resumes the same training or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import Any

from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from ..data import ClassificationDataset, StreamingDataset, fingerprint, output_size
from ..errors import InputError, printable
from ..files import write_text
from ..heads import base_model, num_classes, timm_model
from ..patch import class_names
from ..training_args import check_numbers
from .evaluation import check_metrics
from .labels import check_labels
from .schedule import explain_optimizer_errors

logger = logging.get_logger(__name__)

PROVENANCE = "trained_on.json"

# Optimizer and scheduler come back as they were, so the checkpoint's values count.
RESTORED = (
    *("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_args"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
)
HEAD_RATES = ("head_lr", "head_lr_multiplier")

# A run may change these: its own values count.
CHANGEABLE = (
    *("num_train_epochs", "max_steps", "logging_strategy", "logging_steps", "eval_strategy", "eval_steps"),
    *("save_strategy", "save_steps", "label_smoothing_factor", "max_grad_norm", "bf16", "fp16", "head_warmup_steps"),
    *("metric_for_best_model", "augmentation", "mixup_alpha", "cutmix_alpha", "class_weights", "compute_loss_func"),
)

Options = dict[str, Any]


def check_provenance(trainer: Any, checkpoint: str | None) -> Options:
    """Describe what a run trains on, compare it with a checkpoint, and take over what the checkpoint restores.

    A trainer's `args` get the checkpoint's values of what is restored with the optimizer and the scheduler, so that
    logs, configs and cards tell what was used. A warning names them. [`save_provenance`] writes what is returned.

    Raises:
        InputError: the labels do not fit the model, `metric_for_best_model` is not measured, or the checkpoint was
            trained on something else.
    """
    check_labels(trainer)
    check_metrics(trainer)
    facts = _facts(trainer)
    if checkpoint is not None:
        file, differences = Path(checkpoint, PROVENANCE), []
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
            differences = _differences(saved["facts"], facts)
            if not differences:
                _restore(trainer, checkpoint, saved["options"])
                check_numbers(trainer.args)
                _name_unknown(facts)
        except FileNotFoundError:
            logger.warning(
                f"{checkpoint} does not say what it was trained on: make sure that classes, examples, model and "
                "options are the same."
            )
        # Values of other types than a run writes.
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{file} is damaged. Resume from another checkpoint, `resume_from_checkpoint=FOLDER`."
            ) from error
        if differences:
            raise InputError(
                f"{checkpoint} was trained on something else. {'; '.join(differences)}. Resume with the same, or "
                "start a new run in another `output_dir`."
            )
    return {"facts": facts, "options": _options(trainer)}


def save_provenance(provenance: Options, checkpoint: Path) -> None:
    """Write what [`check_provenance`] has described into a checkpoint."""
    write_text(checkpoint / PROVENANCE, json.dumps(provenance, indent=2, ensure_ascii=False) + "\n")


def _facts(trainer: Any) -> Options:
    """Describe what must not differ between a checkpoint and the run that resumes it."""
    args, own, model = trainer.args, trainer.head_args, base_model(trainer.model)
    parameters = list(trainer.model.parameters())
    head = trainer.heads()[0].module
    known = isinstance(model, PreTrainedModel)
    facts = {
        "classes": class_names(model.config) if known else num_classes(head),
        "model": model.config.architecture if known and timm_model(model) is not None else type(model).__name__,
        "parameters": sum(map(_count, parameters)),
        "trained parameters": sum(_count(parameter) for parameter in parameters if parameter.requires_grad),
        "optimizer": _optimizer(trainer),
        "training examples": _fingerprints(trainer.train_dataset),
        "evaluation examples": _fingerprints(trainer.eval_dataset),
        "images": _images(trainer),
        "`recipe`": own.recipe,
        "`freeze_backbone`": own.freeze_backbone,
        "`freeze_statistics`": bool(own.resolve("freeze_statistics")),
        "`seed`": args.seed,
        "`data_seed`": args.data_seed,
        "examples per step": args.train_batch_size * args.world_size * args.gradient_accumulation_steps,
    }
    if args.auto_find_batch_size:
        del facts["examples per step"]
    return json.loads(json.dumps(facts))


def _fingerprints(dataset: Any) -> Options | None:
    if isinstance(dataset, dict):
        return {name: fingerprint(each) for name, each in dataset.items()}
    return None if dataset is None else fingerprint(dataset)


def _count(parameter: Any) -> int:
    # DeepSpeed's shards.
    return getattr(parameter, "ds_numel", parameter.numel())


def _optimizer(trainer: Any) -> str:
    """Name the class of a trainer's optimizer, which need not be built yet."""
    if trainer.optimizer is not None and not trainer.is_deepspeed_enabled:
        optimizer = trainer.optimizer
        # accelerate's wrapper.
        return type(getattr(optimizer, "optimizer", optimizer)).__name__
    if trainer.optimizer_cls_and_kwargs is not None:
        return trainer.optimizer_cls_and_kwargs[0].__name__
    with explain_optimizer_errors(trainer.args):
        return trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)[0].__name__


def _images(trainer: Any) -> str | None:
    """Describe the size of images and how their values are scaled, as far as it is known."""
    dataset = trainer.train_dataset
    if not isinstance(dataset, ClassificationDataset | StreamingDataset):
        return image_size(trainer.processing_class)
    preparation = dataset.pipeline.preparation
    scaling = [f"{value:.3g}" for value in (*preparation.scale.flatten(), *preparation.shift.flatten())]
    return f"{image_shape(*preparation.output_size)}, scaled by {', '.join(scaling)}"


def image_size(processor: Any) -> str | None:
    """Describe the size of images that a processor gives, if it gives images of one size."""
    try:
        return image_shape(*output_size(processor))
    # Another processor than an image processor, or one whose images differ in size.
    except (InputError, AttributeError, TypeError, ValueError):
        return None


def image_shape(height: int, width: int) -> str:
    """Write the size of an image."""
    return f"{height} × {width} px"


def _options(trainer: Any) -> Options:
    names = (*RESTORED, *HEAD_RATES, *CHANGEABLE)
    options = {name: _plain(getattr(trainer.args, name)) for name in names if hasattr(trainer.args, name)}
    # A warm-up makes one of the other.
    if options["lr_scheduler_type"] == "constant" and options["warmup_steps"]:
        options["lr_scheduler_type"] = "constant_with_warmup"
    if isinstance(trainer.train_dataset, ClassificationDataset | StreamingDataset):
        augmentation = trainer.train_dataset.pipeline.augmentation
        options["augmentation"] = getattr(augmentation, "name", "none")
        options |= {name: getattr(augmentation, name, 0.0) for name in ("mixup_alpha", "cutmix_alpha")}
    weights, loss = getattr(trainer.label_smoother, "class_weights", None), trainer.compute_loss_func
    options["class_weights"] = None if weights is None else [float(f"{weight:.6g}") for weight in weights.tolist()]
    # The name alone: two functions cannot be compared.
    function = getattr(loss, "function", loss)
    options["compute_loss_func"] = loss and getattr(function, "__qualname__", type(function).__qualname__)
    return json.loads(json.dumps(options, default=str))


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def _differences(saved: Options, facts: Options) -> list[str]:
    return [
        f"{name}: {_difference(saved[name], value)}"
        for name, value in facts.items()
        # What one of the two does not know cannot be compared.
        if saved.get(name) is not None and value is not None and saved[name] != value
    ]


def _name_unknown(facts: Options) -> None:
    """Say which examples cannot be compared with a checkpoint's."""
    known = {"training": facts["training examples"]}
    evaluated = facts["evaluation examples"]
    several = evaluated is not None and all(isinstance(value, dict) for value in evaluated.values())
    known |= evaluated if several else {"evaluation": evaluated}
    described = {name: value.get("hash") or value.get("files") for name, value in known.items() if value is not None}
    if names := [name for name, value in described.items() if not value]:
        logger.warning(
            f"The {' and '.join(names)} examples have no labels, names or files that could be compared with the "
            "checkpoint's: make sure that they are the same."
        )


def _difference(saved: Any, value: Any) -> str:
    """Say how two values differ; of long lists, the first difference."""
    if isinstance(saved, list) and isinstance(value, list):
        if len(saved) != len(value):
            other = [name for name in value if name not in saved] or [name for name in saved if name not in value]
            return f"{len(saved)} in the checkpoint, {len(value)} in this run (such as {printable(other[0])})"
        index = next(i for i, (a, b) in enumerate(zip(saved, value, strict=True)) if a != b)
        return f"{index} is {printable(saved[index])} in the checkpoint, {printable(value[index])} in this run"
    if isinstance(saved, dict) and isinstance(value, dict):
        if saved.keys() != value.keys():
            return f"{', '.join(map(str, saved))} in the checkpoint, {', '.join(map(str, value))} in this run"
        if "examples" not in value:
            name = next(name for name in value if saved[name] != value[name])
            return f"{name}: {_difference(saved[name], value[name])}"
        if saved["examples"] == value["examples"]:
            return f"{value['examples']:,} in both, but others or in another order"
        saved, value = saved["examples"], value["examples"]
    return f"{saved} in the checkpoint, {value} in this run"


def _restore(trainer: Any, checkpoint: str, saved: Options) -> None:
    """Set a run's arguments to what a checkpoint restores, and say which of different values count."""
    args, now = trainer.args, _options(trainer)
    names = [*RESTORED]
    # A head that gets or loses a learning rate of its own is refused where groups are compared.
    if all(any(options.get(name) is not None for name in HEAD_RATES) for options in (saved, now)):
        names += HEAD_RATES
    kept = [name for name in names if name in saved and name in now and saved[name] != now[name]]
    for name in kept:
        value = SchedulerType(saved[name]) if name == "lr_scheduler_type" else saved[name]
        setattr(args, name, value)
    changed = [name for name in CHANGEABLE if name in saved and name in now and saved[name] != now[name]]
    parts = []
    if kept:
        values = ", ".join(f"`{name}={saved[name]}` (not {now[name]})" for name in kept)
        parts.append(f"The checkpoint's values count: {values}. To change them, start a new run from its model.")
    if changed:
        values = ", ".join(f"`{name}={_short(now[name])}` (before: {_short(saved[name])})" for name in changed)
        parts.append(f"This run's values count from here on: {values}.")
    if parts:
        logger.warning(f"Resuming {checkpoint}. {' '.join(parts)}")


def _short(value: Any) -> str:
    return shorten(str(value), 80, placeholder=" ...]")


def used_options(options: Options, args: TrainingArguments) -> Options:
    """Replace, among the options that a run was given, those that its checkpoint has overridden."""
    names = [name for name in (*RESTORED, *HEAD_RATES) if name in options]
    return {**options, **{name: _plain(getattr(args, name)) for name in names}}
