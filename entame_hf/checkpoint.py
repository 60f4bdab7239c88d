"""Checkpoints that load anywhere: the stock model folded, and what going on needs in a file beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from . import __version__
from .config import EntameConfig
from .fold import normalised_heads
from .heads import find_heads, num_classes, timm_model
from .patch import applied_config, mark_applied, mark_trained, set_feature_norm

HEAD_STATE_NAME = "entame_head.safetensors"

# Reading what is installed takes as long as a twentieth of saving a ViT-B.
_version = cache(version)


def save_head_state(
    model: nn.Module, config: EntameConfig, folder: str | Path, state_dict: dict[str, Tensor] | None = None
) -> None:
    """Write what folding loses: the heads as they train, and the statistics of their features.

    Args:
        model (`torch.nn.Module`): the model in training.
        config ([`EntameConfig`]): what it is trained with; kept in the file's metadata.
        folder (`str` or `Path`): the checkpoint's folder.
        state_dict (`dict[str, torch.Tensor]`, *optional*): the model's, gathered from shards.
    """
    state = model.state_dict() if state_dict is None else state_dict
    heads = tuple(f"{path}." for path, _ in normalised_heads(model))
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items() if name.startswith(heads)}
    metadata = {"format": "pt", "entame": json.dumps(config.to_dict())}
    safetensors.torch.save_file(tensors, str(Path(folder, HEAD_STATE_NAME)), metadata=metadata)


def saved_config(folder: str | Path) -> EntameConfig | None:
    """Read which configuration a checkpoint was trained with; None where it was not trained with ENTAME."""
    file = Path(folder, HEAD_STATE_NAME)
    if not file.exists():
        return None
    with safe_open(str(file), framework="pt") as tensors:
        return EntameConfig.from_dict(json.loads(tensors.metadata()["entame"]))


def saved_record(folder: str | Path) -> dict[str, Any]:
    """Read what a checkpoint's config says of how its model was adapted; nothing where it says nothing."""
    file = Path(folder, CONFIG_NAME)
    return (json.loads(file.read_text()).get("entame") if file.exists() else None) or {}


def prepare_heads(model: nn.Module, config: EntameConfig) -> None:
    """Give a model the structure that a checkpoint's head state needs, without drawing anything."""
    set_feature_norm(find_heads(model, config.head), config)
    mark_applied(model, config)


def load_weights(model: nn.Module, folder: str | Path) -> bool:
    """Load a checkpoint into a model in memory through `from_pretrained`, where that can build the model.

    transformers saves some models under the names their checkpoints have on the Hub (ViT among them). Trainer's own
    loading does not translate them back: it leaves such a backbone as it was, with a warning.

    Args:
        model (`torch.nn.Module`): of the class that was saved.
        folder (`str` or `Path`): the checkpoint's folder.

    Returns:
        `bool`: whether it was loaded. It is not where the model's class takes more than a config, or where the folder
        was removed.

    Raises:
        RuntimeError: the checkpoint does not hold exactly the model's tensors.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    try:
        # Wide enough for every tensor of a model of mixed precision.
        stock = type(model).from_pretrained(folder, dtype=torch.promote_types(model.dtype, torch.float32))
    except (TypeError, OSError):
        return False
    model.load_state_dict(stock.state_dict())
    return True


def load_head_state(model: nn.Module, folder: str | Path) -> None:
    """Load what [`save_head_state`] wrote, over the folded weights; does nothing where there is none.

    Args:
        model (`torch.nn.Module`): a model with the structure that was saved.
        folder (`str` or `Path`): the checkpoint's folder.
    """
    file = Path(folder, HEAD_STATE_NAME)
    if not file.exists():
        return
    tensors = safetensors.torch.load_file(str(file))
    for path, leaf in normalised_heads(model):
        prefix = f"{path}."
        leaf.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    mark_trained(model)


def adaptation_record(
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
        "versions": {"entame-hf": __version__, **{name: _version(name) for name in ("timm", "torch", "transformers")}},
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
