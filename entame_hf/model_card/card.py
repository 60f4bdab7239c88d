"""The model card: what is known of a training and its model, beside the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from matplotlib.figure import Figure
from transformers import PreTrainedModel
from transformers.modelcard import METRIC_TAGS, extract_hyperparameters_from_trainer

from ..config import noise_to_signal_ratio
from ..heads import base_model, find_heads, is_peft, num_classes, timm_model
from ..metrics import Evaluation
from ..patch import class_names, describe_adaptation
from ..plots.confusion import confusion_matrix_figure
from ..plots.curves import History, feature_variance_curves, learning_curves, noise_share_curves, save_figures, series
from ..trainer.base_noise import KEY as BASE_NOISE_SHARE
from .text import HUB, OF_ENTAME, CardFacts, card_text
from .update import generated_card, update_card

CARD_NAME = "README.md"

TASK = "image-classification"

NOISE_SHARE = "energy/noise_share"

LICENSE_KEYS = ("license", "license_name", "license_link")

# Beside those that Trainer lists.
HYPERPARAMETERS = (
    "lr_scheduler_kwargs",
    "weight_decay",
    "max_grad_norm",
    "bf16",
    "freeze_backbone",
    "freeze_statistics",
)


def write_model_card(
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
) -> None:
    """Write README.md and its pictures into the output folder of a trainer.

    A README.md that is there keeps what people wrote into it, see [`update_card`]. Of a local path, the last part
    alone is written.

    Args:
        trainer ([`EntameTrainer`]): trained or not.
        language (`str`, *optional*): goes to the metadata.
        license (`str`, *optional*): defaults to what the base model's card says, if that can be read.
        tags (`str` or `list[str]`, *optional*): beside those that are set anyway.
        model_name (`str`, *optional*): defaults to the name of the repository, or of the output folder.
        finetuned_from (`str`, *optional*): the base model; defaults to what the model was loaded from.
        tasks (`str` or `list[str]`, *optional*, defaults to image-classification): the first is the pipeline's tag.
        dataset_tags (`str` or `list[str]`, *optional*): ids of data sets on the Hub.
        dataset (`str` or `list[str]`, *optional*): what to call the data.
        dataset_args (`str` or `list[str]`, *optional*): the data set's configuration.

    Raises:
        InputError: the metadata of the README.md that is there cannot be read; it is left as it is.
    """
    folder = Path(trainer.args.output_dir)
    base = finetuned_from or getattr(getattr(trainer.model, "config", None), "_name_or_path", None)
    known = {"license": license} if license else license_of(base)
    ids = [name for name in _as_list(dataset_tags) if is_hub_id(name)]
    names = [Path(name).name for name in (*_as_list(dataset), *_as_list(dataset_tags)) if name not in ids]
    repository = getattr(trainer, "hub_model_id", None)
    model, training = _about_model(trainer), _about_training(trainer)
    evaluation = _evaluation(trainer, len(model["class_names"]))
    figures = _figures(trainer.state.log_history, evaluation, model["class_names"], training["adaptation"])
    folder.mkdir(parents=True, exist_ok=True)
    facts = CardFacts(
        name=model_name or (repository or folder.absolute().name).rpartition("/")[2],
        address=repository or ".",
        base_model=base if is_hub_id(base) else None,
        base_name=Path(base).name if base else None,
        license={key: known[key] for key in LICENSE_KEYS if known.get(key)},
        inherits_license=not license,
        datasets=ids,
        dataset_name=", ".join(names),
        evaluation=evaluation,
        pictures=save_figures(figures, folder),
        **model,
        **training,
    )
    data = _metadata(facts, _as_list(tags), _as_list(dataset_args), (_as_list(tasks) or [TASK])[0], language)
    file = folder / CARD_NAME
    existing = file.read_bytes().decode("utf-8-sig") if file.exists() else None
    file.write_bytes(update_card(existing, generated_card(data, card_text(facts))).encode())


def is_hub_id(name: str | None) -> bool:
    """Tell whether a name is an id on the Hub: well-formed, and no path on this machine."""
    try:
        validate_repo_id(name or "")
    except ValueError:
        return False
    return not Path(str(name)).exists()


@cache
def license_of(base: str | None) -> dict[str, Any]:
    """Read the metadata of a base model's card for its license.

    Args:
        base (`str`, *optional*): an id on the Hub, or a local folder.

    Returns:
        `dict`: the card's metadata; empty where there is no card, it cannot be reached or it cannot be read.
    """
    card = Path(base or "", CARD_NAME)
    if not base or not (card.is_file() or is_hub_id(base)):
        return {}
    try:
        values = ModelCard.load(card if card.is_file() else base, ignore_metadata_errors=True).data.to_dict()
    # Offline and not in the cache; no such model or card; not a card.
    except (OSError, EntryNotFoundError, ValueError, yaml.YAMLError):
        return {}
    link = values.get("license_link")
    if link and "://" not in link:
        values["license_link"] = None if card.is_file() else f"{HUB}{base}/blob/main/{link}"
    return values if isinstance(values.get("license"), str) else {}


def _about_model(trainer: Any) -> dict[str, Any]:
    model = base_model(trainer.model)
    timm = timm_model(model) is not None
    library = "transformers" if isinstance(model, PreTrainedModel) else None
    classes = num_classes(find_heads(trainer.model, trainer.entame_config().head)[0].module)
    return {
        "is_adapter": is_peft(trainer.model),
        "architecture": model.config.architecture if timm else type(model).__name__,
        "class_names": class_names(model.config) if library else [str(index) for index in range(classes)],
        "library_name": "timm" if timm else library,
        # A timm model's config says how its images are prepared.
        "has_processor": timm or trainer.processing_class is not None,
    }


def _evaluation(trainer: Any, classes: int) -> Evaluation:
    evaluation = trainer.evaluations.current(trainer.state)
    if evaluation.confusion is None:
        return evaluation
    unseen = classes - len(evaluation.confusion)
    return evaluation._replace(confusion=np.pad(evaluation.confusion, (0, unseen)) if unseen >= 0 else None)


def _about_training(trainer: Any) -> dict[str, Any]:
    args, own, history = trainer.args, trainer.head_args, trainer.state.log_history
    adaptation = describe_adaptation(trainer.model, own.entame_method, args.learning_rate, trainer.head_rates.record())
    if adaptation is None or trainer.state.global_step == 0:
        # Not trained here: what its own config says.
        return {"adaptation": getattr(getattr(trainer.model, "config", None), "entame", None)}
    noise = None
    if adaptation["init"] == "mei" and args.learning_rate > 0:
        examples = trainer._train_batch_size * args.world_size * args.gradient_accumulation_steps
        config, classes = trainer.entame_config(), adaptation["num_labels"]
        noise = noise_to_signal_ratio(config, classes, args.learning_rate, examples)
    more = {name: getattr(args, name) for name in HYPERPARAMETERS if getattr(args, name, False)}
    name = "head_lr_multiplier" if own.head_lr is None else "head_lr"
    more[name], more["head_warmup_steps"] = getattr(own, name), own.warmup_steps_of_head()
    first = {key: dict(zip(*series(history, key), strict=True)).get(1) for key in (NOISE_SHARE, BASE_NOISE_SHARE)}
    return {
        "adaptation": adaptation,
        "hyperparameters": {**extract_hyperparameters_from_trainer(trainer), **more},
        "noise": noise,
        "noise_share": first[NOISE_SHARE],
        "base_noise_share": first[BASE_NOISE_SHARE],
    }


def _figures(
    history: History, evaluation: Evaluation, names: list[str], adaptation: dict[str, Any] | None
) -> dict[str, Figure | None]:
    method = adaptation["method"] if adaptation else ""
    confusion = evaluation.confusion
    return {
        "confusion_matrix": None if confusion is None else confusion_matrix_figure(confusion, names),
        "learning_curves": learning_curves(history),
        "noise_share": noise_share_curves({method: [series(history, NOISE_SHARE)]}, classes=len(names)),
        "feature_variance": feature_variance_curves({method: [series(history, "energy/feature_var")]}),
    }


def _metadata(
    facts: CardFacts, tags: list[str], configurations: list[str], task: str, language: str | None
) -> ModelCardData:
    # As on timm's own cards, whose models transformers loads too.
    libraries = ["timm", "transformers"] if facts.library_name == "timm" else []
    method = facts.adaptation["method"] if facts.adaptation else None
    return ModelCardData(
        **facts.license,
        base_model=facts.base_model,
        base_model_relation=("adapter" if facts.is_adapter else "finetune") if facts.base_model else None,
        datasets=facts.datasets or None,
        library_name="peft" if facts.is_adapter else facts.library_name,
        pipeline_tag=task,
        language=language,
        tags=[TASK, *libraries, *(["entame"] if method in OF_ENTAME else []), "generated_from_trainer", *tags],
        model_name=facts.name,
        **_results(facts, configurations),
    )


def _results(facts: CardFacts, configurations: list[str]) -> dict[str, Any]:
    """Give the metrics that the Hub knows by name, for `ModelCardData`."""
    known = [
        (kind, name, value)
        for name, value in facts.evaluation.metrics.items()
        for kind in METRIC_TAGS
        # Infinite numbers are no valid metadata.
        if (name == kind or name.startswith(f"{kind}_")) and math.isfinite(value)
    ]
    if not known:
        return {}
    name = facts.datasets[0] if facts.datasets else facts.dataset_name or "unknown"
    results = [
        EvalResult(
            task_type=TASK,
            task_name="Image classification",
            dataset_type=name if facts.datasets else "unknown",
            dataset_name=name,
            dataset_config=configurations[0] if configurations else None,
            metric_type=kind,
            metric_name=metric.replace("_", " "),
            metric_value=value,
        )
        for kind, metric, value in known
    ]
    return {"metrics": list(dict.fromkeys(kind for kind, *_ in known)), "eval_results": results}


def _as_list(value: str | Iterable[str] | None) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
