"""Wrap bare timm models as transformers models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BaseImageProcessor, PreTrainedModel

from ..errors import InputError
from ..heads import base_model, find_heads, is_peft, num_classes, timm_model
from .saving import patch_save_pretrained, pretrained_cfg


def label_maps(names: list[str]) -> dict[str, dict[Any, Any]]:
    """Build `id2label` and `label2id` for a model's config."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def timm_processor(model: PreTrainedModel) -> BaseImageProcessor:
    """Build the image processor of a wrapped timm model that was never saved, from its pretrained config."""
    from transformers import TimmWrapperImageProcessor

    return TimmWrapperImageProcessor(pretrained_cfg(model), architecture=model.config.architecture)


def as_transformers(model: nn.Module) -> Any:
    """Wrap a bare timm model so that Trainer can train it; any other model is returned as it is.

    The wrapper holds `model` itself, which is trained in place. Its `save_pretrained` writes files that both timm and
    transformers load.

    Args:
        model (`torch.nn.Module`): a model made by `timm.create_model`, or any other.

    Returns:
        `TimmWrapperForImageClassification` or `model`.

    Raises:
        InputError: the timm model was built with arguments that its checkpoint would not hold, or has adapters.
    """
    inner = timm_model(model)
    if inner is None or isinstance(base_model(model), PreTrainedModel):
        return model
    if is_peft(model):
        raise InputError("Wrap a timm model before you add adapters: get_peft_model(as_transformers(model), config).")
    # Imported here: it imports timm, which takes half of the time that importing this package takes.
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    architecture = inner.pretrained_cfg["architecture"]
    known = inner.pretrained_cfg.get("label_names") or []
    # The head may have been replaced by hand.
    classes = num_classes(find_heads(inner)[0].module)
    named = label_maps(list(known)) if len(known) == classes else {}
    for model_args in _likely_arguments(inner):
        config = TimmWrapperConfig.from_dict(
            {"architecture": architecture, "pretrained_cfg": dict(inner.pretrained_cfg), "model_args": model_args},
            num_labels=classes,
            **named,
        )
        # No second copy of the weights, and nothing drawn from the random generator.
        with torch.device("meta"):
            wrapper = TimmWrapperForImageClassification(config)
        if _shapes(wrapper.timm_model) == _shapes(inner):
            wrapper.timm_model, inner.num_classes = inner, classes
            patch_save_pretrained(wrapper)
            return wrapper
    raise InputError(
        f"This {architecture} differs from timm.create_model({architecture!r}, num_classes={classes}), so "
        "no checkpoint of it would load. Build it through transformers, which saves the arguments: "
        "AutoModelForImageClassification.from_pretrained(..., model_args={...})."
    )


def _likely_arguments(model: Any) -> list[dict[str, Any]]:
    """List arguments that `timm.create_model` may have had: only layers made for one image size show them."""
    sizes = (getattr(module, "img_size", None) for module in model.modules())
    size = next((size for size in sizes if size is not None), None)
    return [{}] if size is None else [{}, {"img_size": list(size) if isinstance(size, tuple) else size}]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items() if ".znorm." not in name}
