"""Bare timm models in, transformers classifiers out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TimmWrapperConfig, TimmWrapperForImageClassification

from .heads import timm_model


def as_transformers(model: nn.Module) -> nn.Module:
    """Wrap a bare timm model so that Trainer can train it; every other model is returned as it is.

    The wrapper holds `model` itself: what is trained through it is trained in place.

    Args:
        model (`torch.nn.Module`): a model made by `timm.create_model`, or any other.

    Returns:
        `TimmWrapperForImageClassification` or `model`.

    Raises:
        ValueError: the timm model was built with arguments that its saved checkpoint could not tell.
    """
    inner = timm_model(model)
    if inner is None or isinstance(model, PreTrainedModel):
        return model
    architecture = inner.pretrained_cfg["architecture"]
    for model_args in _likely_arguments(inner):
        config = TimmWrapperConfig.from_dict(
            {"architecture": architecture, "pretrained_cfg": dict(inner.pretrained_cfg), "model_args": model_args},
            num_labels=inner.num_classes,
        )
        # No second copy of the weights, and nothing drawn from the random generator.
        with torch.device("meta"):
            wrapper = TimmWrapperForImageClassification(config)
        if _shapes(wrapper.timm_model) == _shapes(inner):
            wrapper.timm_model = inner
            return wrapper
    raise ValueError(
        f"This {architecture} differs from timm.create_model({architecture!r}, num_classes={inner.num_classes}), so no "
        "checkpoint of it would load. Build it through transformers, which saves the arguments: "
        "AutoModelForImageClassification.from_pretrained(..., model_args={...})."
    )


def _likely_arguments(model: Any) -> list[dict[str, Any]]:
    """List what `timm.create_model` may have been given: it leaves no trace but the model's shape."""
    image_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return [{}] if image_size is None else [{}, {"img_size": list(image_size)}]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items() if ".znorm." not in name}
