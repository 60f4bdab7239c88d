"""Checkpoints that load anywhere: the stock model folded, and what going on needs in a file beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..config import EntameConfig
from ..heads import find_heads
from ..patch import normalised_heads, set_applied, set_feature_norm, set_trained

HEAD_STATE_NAME = "entame_head.safetensors"


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
    set_applied(model, config)


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
    set_trained(model)
