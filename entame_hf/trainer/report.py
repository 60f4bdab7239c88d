"""The model card of a trainer: gather what it knows, draw it, write it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import PreTrainedModel
from transformers.modelcard import extract_hyperparameters_from_trainer
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..config import noise_to_signal_ratio
from ..data import ClassificationDataset, StreamingDataset, cores, is_converted
from ..heads import base_model, find_heads, is_peft, num_classes, timm_model
from ..metrics import Evaluation
from ..model_card import CardFacts, is_hub_id, license_of, write_model_card
from ..patch import class_names, describe_adaptation, timm_processor, unsaved_batch_norms
from .provenance import image_shape, image_size

logger = logging.get_logger(__name__)

# Images for the Hub's widget; and those that are looked at for transparency.
EXAMPLES, LOOKED_AT = 3, 64

# Arguments that the card tells beside those that Trainer's card tells.
HYPERPARAMETERS = ("lr_scheduler_kwargs", "max_grad_norm", "bf16", "freeze_backbone")


def try_to_write_card(trainer: Any, *args: Any, **options: Any) -> None:
    """Write the model card as [`write_card`] does; warn where that fails, since the model is saved."""
    try:
        write_card(trainer, *args, **options)
    except Exception as error:
        logger.warning(f"The model card was not written: {error} ({type(error).__name__}).")


def write_card(trainer: Any, *args: Any, images: bool = True, **options: Any) -> None:
    """Write README.md and its pictures into a trainer's output folder; `args` and `options` as for [`card_facts`].

    A README.md that is there keeps what people wrote into it, see [`write_model_card`]. With `images`, the card shows
    a training batch where the folder holds it as batch.png, the most confident errors, and examples for the Hub's
    widget: a push publishes them.
    """
    # Imported here: matplotlib takes long to import, and most processes never draw.
    from .. import plots

    facts, history = card_facts(trainer, *args, **options), trainer.state.log_history
    if facts.has_processor and _differs_from_processor(trainer):
        facts = replace(facts, has_processor=False)
    folder, names = Path(trainer.args.output_dir), facts.class_names
    folder.mkdir(parents=True, exist_ok=True)
    method = facts.adaptation["method"] if facts.adaptation else ""
    confusion, errors = facts.evaluation.confusion, facts.evaluation.errors
    figures = {
        "confusion_matrix": None if confusion is None else plots.confusion_matrix_figure(confusion, names),
        "learning_curves": plots.learning_curves(history),
        "error_energy": plots.error_energy_figure(history),
        "feature_variance": plots.feature_variance_curves({method: [plots.series(history, "energy/feature_var")]}),
    }
    examples: dict[str, str] = {}
    if images:
        wrong = [] if errors is None else _evaluated_images(trainer, errors.indices)
        # `evaluate` may have been given another dataset than the trainer's own.
        if errors is not None and [label for _, label in wrong] == errors.true.tolist():
            figures["wrong_images"] = plots.wrong_images_figure([image for image, _ in wrong], *errors[1:], names)
        count = len(trainer.eval_dataset) if has_length(trainer.eval_dataset) else 0
        for image, label in _evaluated_images(trainer, range(0, count, -(-count // EXAMPLES) or 1)):
            file = f"example_{len(examples) + 1}.png"
            plots.save_image(image, folder / file)
            examples[file] = names[label]
    pictures = plots.save_figures(figures, folder)
    if images and (folder / "batch.png").is_file():
        pictures.append("batch.png")
    write_model_card(folder, replace(facts, pictures=pictures, examples=examples))


def _differs_from_processor(trainer: Any) -> bool:
    """Tell whether evaluated images have another size than the saved processor gives, and warn if so."""
    model = base_model(trainer.model)
    saved = image_size(trainer.processing_class or timm_processor(model))
    shapes = [np.shape(image) for image, _ in _evaluated_images(trainer, [0])]
    evaluated = next((image_shape(*shape[1:]) for shape in shapes if len(shape) == 3 and shape[0] == 3), None)
    if None in (saved, evaluated) or saved == evaluated:
        return False
    logger.warning(
        f"Evaluated images are {evaluated}, and the image processor that is saved gives {saved}: pipeline and timm "
        "would predict on other images. Give `processing_class` that prepares them so, such as set_image_size makes."
    )
    return True


def _evaluated_images(trainer: Any, indices: Any) -> list[tuple[Any, int]]:
    """Get evaluation images as the model reads them, with their labels; empty if the dataset has no such items."""
    dataset = trainer.eval_dataset
    if dataset is None or isinstance(dataset, IterableDataset | dict):
        return []
    try:
        items = [dataset[int(index)] for index in indices]
        return [(np.asarray(item[trainer.model.main_input_name]), int(item["labels"])) for item in items]
    # A dataset whose collator makes images and labels of its items.
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return []


def card_facts(
    trainer: Any,
    language: str | None = None,
    license: str | None = None,
    tags: str | list[str] | None = None,
    model_name: str | None = None,
    finetuned_from: str | None = None,
    tasks: str | list[str] | None = None,
    dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None,
    dataset_args: str | list[str] | None = None,
) -> CardFacts:
    """Gather the facts of a model card, without pictures. Of a local path, they hold the last part alone.

    The arguments are those of [`Trainer.create_model_card`], with other defaults: the license is the base model's, the
    name is the repository's or the output folder's, and the base model is what the model was loaded from.
    """
    args, history = trainer.args, trainer.state.log_history
    model = base_model(trainer.model)
    timm = timm_model(model) is not None
    library = "transformers" if isinstance(model, PreTrainedModel) else None
    classes = num_classes(find_heads(trainer.model, trainer.entame_config().head)[0].module)
    base = finetuned_from or getattr(getattr(trainer.model, "config", None), "_name_or_path", None)
    ids = [name for name in _as_list(dataset_tags) if is_hub_id(name)]
    names = [Path(name).name for name in (*_as_list(dataset), *_as_list(dataset_tags)) if name not in ids]
    repository = getattr(trainer, "hub_model_id", None)
    facts = CardFacts(
        name=model_name or (repository or Path(args.output_dir).absolute().name).rpartition("/")[2],
        architecture=model.config.architecture if timm else type(model).__name__,
        class_names=class_names(model.config) if library else [str(index) for index in range(classes)],
        evaluation=_padded(trainer.evaluations.current(trainer.state), classes),
        repository=repository,
        library_name="timm" if timm else library,
        # A timm model's config says how its images are prepared.
        has_processor=timm or trainer.processing_class is not None,
        converts_images=_converts_images(trainer.eval_dataset),
        is_adapter=is_peft(trainer.model),
        base_model=base if is_hub_id(base) else None,
        base_name=Path(base).name if base else None,
        license={"license": license} if license else license_of(base),
        inherits_license=not license,
        datasets=ids,
        dataset_name=", ".join(names),
        dataset_config=next(iter(_as_list(dataset_args)), None),
        language=language,
        tags=_as_list(tags),
        task=next(iter(_as_list(tasks)), "image-classification"),
        probe_accuracy=_first(history, "probe_accuracy"),
    )
    record = describe_adaptation(
        trainer.model, trainer.head_args.entame_method, args.learning_rate, trainer.head_rates.record()
    )
    if record is None or trainer.state.global_step == 0:
        # Not trained here: the record that its own config holds.
        return replace(facts, adaptation=getattr(getattr(trainer.model, "config", None), "entame", None))
    noise = None
    if record["init"] == "mei" and args.learning_rate > 0:
        examples = trainer._train_batch_size * args.world_size * args.gradient_accumulation_steps
        noise = noise_to_signal_ratio(trainer.entame_config(), classes, args.learning_rate, examples)
    return replace(
        facts,
        training=_training(trainer),
        adaptation=record,
        noise=noise,
        noise_share=_first(history, "energy/noise_share"),
        base_noise_share=_first(history, "energy/base_noise_share"),
        hyperparameters=_hyperparameters(trainer),
    )


def _converts_images(dataset: Any) -> bool:
    """Tell whether others would read images of a dataset otherwise, by some of them."""
    if not isinstance(dataset, ClassificationDataset):
        return False
    rows = range(0, len(dataset), -(-len(dataset) // LOOKED_AT) or 1)
    return any(is_converted(dataset.dataset[row][dataset.image_column]) for row in rows)


def _first(history: list[dict[str, Any]], key: str) -> float | None:
    """Get what the first step logged under a key; None where it logged nothing."""
    return next((entry[key] for entry in history if key in entry and entry.get("step", 0) <= 1), None)


def _padded(evaluation: Evaluation, classes: int) -> Evaluation:
    """Complete the confusion matrix by the classes that no evaluated image has."""
    if evaluation.confusion is None:
        return evaluation
    unseen = classes - len(evaluation.confusion)
    return evaluation._replace(confusion=np.pad(evaluation.confusion, (0, unseen)) if unseen >= 0 else None)


def _training(trainer: Any) -> dict[str, Any]:
    args, train, dtype = trainer.args, trainer.train_dataset, trainer.head_args.save_dtype
    runtimes = [entry["train_runtime"] for entry in trainer.state.log_history if "train_runtime" in entry]
    device = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else args.device.type.upper()
    return {
        "recipe": trainer.head_args.recipe,
        "training images": len(train) if has_length(train) else None,
        "image size": image_size(trainer.processing_class),
        "augmentation": _augmentation(train),
        "hardware": f"{args.world_size} × {device}" + (f", {cores()} cores" if args.device.type == "cpu" else ""),
        "weights": None if dtype == "float32" else f"saved in {dtype}, evaluated in float32",
        "duration": _duration(runtimes[-1]) if runtimes else None,
    }


def _augmentation(dataset: Any) -> str | None:
    if not isinstance(dataset, ClassificationDataset | StreamingDataset) or not dataset.pipeline.augmentation:
        return None
    augmentation = dataset.pipeline.augmentation
    mixes = {"mixup α": augmentation.mixup_alpha, "cutmix α": augmentation.cutmix_alpha}
    return ", ".join([augmentation.name, *(f"{name} {alpha:g}" for name, alpha in mixes.items() if alpha)])


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def _hyperparameters(trainer: Any) -> dict[str, Any]:
    args, own = trainer.args, trainer.head_args
    values = extract_hyperparameters_from_trainer(trainer) | {"optimizer": _optimizer(trainer.optimizer)}
    values |= {name: getattr(args, name) for name in HYPERPARAMETERS if getattr(args, name, False)}
    if own.resolve("freeze_statistics") or unsaved_batch_norms(trainer.model):
        values["freeze_statistics"] = True
    rate = own.resolve("head_lr")
    head = {"head_lr_multiplier": own.head_lr_multiplier or 1.0} if rate is None else {"head_lr": rate}
    weights = getattr(trainer.label_smoother, "class_weights", None)
    if weights is not None:
        values["class_weights"] = f"{weights.min():.3g} to {weights.max():.3g}, in the loss of the evaluation too"
    return values | head | {"head_warmup_steps": own.warmup_steps_of_head()}


def _optimizer(optimizer: Any) -> str:
    """Name an optimizer with its settings, such as "AdamW, betas (0.9, 0.999), eps 1e-08, weight_decay 0.0"."""
    # accelerate and DeepSpeed wrap it.
    while getattr(optimizer, "optimizer", None) is not None:
        optimizer = optimizer.optimizer
    # Trainer leaves the biases' group without weight decay.
    values = max(optimizer.param_groups, key=lambda group: group.get("weight_decay", 0))
    shown = ("betas", "momentum", "nesterov", "eps", "weight_decay")
    return ", ".join([type(optimizer).__name__, *(f"{name} {values[name]}" for name in shown if name in values)])


def _as_list(value: str | Iterable[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
