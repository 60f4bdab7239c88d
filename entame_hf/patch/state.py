"""State that we leave on a model and in its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import EntameConfig
from ..heads import base_model, find_heads, num_classes, timm_model
from .fold import patch_save_pretrained


def applied_config(model: nn.Module) -> EntameConfig | None:
    """Get the configuration that is applied to a model, before or after adapters were added; None without one."""
    return vars(model).get("entame_config") or vars(base_model(model)).get("entame_config")


def set_applied(model: nn.Module, config: EntameConfig) -> None:
    """Note on the model which configuration its heads have, so that whoever saves it saves the stock model."""
    vars(model)["entame_config"] = config
    patch_save_pretrained(model)


def set_trained(model: nn.Module) -> None:
    """Note on the model that its heads hold something that could be lost."""
    vars(model)["entame_trained"] = True
    if timm_model(model) is not None:
        # Whoever holds the bare model of a wrapper is warned as well.
        vars(timm_model(model))["entame_trained"] = True


def copy_entame_state(model: nn.Module, wrapper: nn.Module, prefix: str) -> None:
    """Note on a wrapper what was noted on the model that it holds under `prefix`."""
    config = applied_config(model)
    if config is not None:
        set_applied(wrapper, config.under(prefix))
    if vars(model).get("entame_trained", False):
        set_trained(wrapper)


def has_trained_head(model: nn.Module) -> bool:
    """Tell whether the model's head was trained with ENTAME, here or according to the config it was loaded with."""
    if vars(model).get("entame_trained", False):
        return True
    base = base_model(model)
    if not isinstance(base, PreTrainedModel):
        return False
    record = getattr(base.config, "entame", None)
    # A head that from_pretrained replaced for another number of classes holds nothing that could be lost.
    return record is not None and record["num_labels"] == base.config.num_labels


def clear_entame_state(model: nn.Module) -> None:
    """Take back that the model's heads hold something that could be lost."""
    for part in (model, timm_model(model)):
        if part is not None:
            vars(part).pop("entame_trained", None)
    if isinstance(model, PreTrainedModel) and hasattr(model.config, "entame"):
        del model.config.entame


# Reading what is installed takes as long as a twentieth of saving a ViT-B.
_version = cache(version)


def describe_adaptation(
    model: nn.Module, method: str | None, learning_rate: float, head_lr: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Describe, for the saved config and the model card, how a model was adapted; plain types that JSON can hold.

    Args:
        model (`torch.nn.Module`): the model in training.
        method (`str`, *optional*):
            What was asked for; where the model's configuration is another's or nothing was, the configuration's.
        learning_rate (`float`): γ, the peak learning rate.
        head_lr (`dict`, *optional*): what was asked for and the heads' own peak rates, see [`HeadRates.record`].

    Returns:
        `dict` or `None`: nothing was applied to this model.
    """
    config = applied_config(model)
    if config is None:
        return None
    classes = num_classes(find_heads(model, config.head)[0].module)
    asked = method and EntameConfig.for_method(method).method  # type: ignore[arg-type]
    return {
        "method": method if asked == config.method else config.method,
        **config.to_dict(),
        "phi_w": config.weight_variance(classes, learning_rate),
        "learning_rate": learning_rate,
        "head_lr": head_lr,
        "num_labels": classes,
        "versions": {name: _version(name) for name in ("entame-hf", "timm", "torch", "transformers")},
    }


def class_names(config: PreTrainedConfig) -> list[str]:
    """List the names of a config's classes by index, in whatever order its map was written."""
    return [name for _, name in sorted((config.id2label or {}).items())]


@contextmanager
def shareable_config(model: nn.Module, record: dict[str, Any] | None) -> Iterator[None]:
    """Let the model's config, while it is being saved, say what was done and be readable by timm and transformers.

    It is the caller's again afterwards: several models may share one config object.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    changes: dict[str, Any] = {} if record is None else {"entame": record}
    if timm_model(model) is not None:
        # null kills timm's loader, and a num_classes in it transformers': {} serves both.
        changes["model_args"] = model.config.model_args or {}
        # transformers keeps the names that a checkpoint came with, whatever its new labels are.
        changes["label_names"] = class_names(model.config)
        if model.config.pretrained_cfg:
            # Where on this machine timm read the weights is nobody else's business.
            places = ("file", "source")
            changes["pretrained_cfg"] = {k: v for k, v in model.config.pretrained_cfg.items() if k not in places}
    values = vars(model.config)
    before = {name: values[name] for name in changes if name in values}
    values.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del values[name]
        values.update(before)
