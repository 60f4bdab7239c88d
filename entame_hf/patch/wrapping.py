"""Wrap bare timm models as transformers models."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import BaseImageProcessor, PreTrainedModel

from ..errors import InputError
from ..heads import base_model, find_heads, is_peft, num_classes, timm_model
from ..layers import without_statistics
from .features import restored_modes
from .gathering import is_sharded
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
    try:
        # The head may have been replaced by hand.
        classes = num_classes(find_heads(inner)[0].module)
    except InputError as error:
        if inner.num_classes == 0:
            raise
        raise InputError(_difference(architecture, inner.num_classes)) from error
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
        if _shapes(wrapper.timm_model) == _shapes(inner) and _computes_alike(wrapper.timm_model, inner, model_args):
            wrapper.timm_model, inner.num_classes = inner, classes
            patch_save_pretrained(wrapper)
            return wrapper
    raise InputError(_difference(architecture, classes))


def _difference(architecture: str, classes: int) -> str:
    return (
        f"This {architecture} differs from timm.create_model({architecture!r}, num_classes={classes}), so a "
        "checkpoint of it would not load, or give other logits. Build it through transformers, which saves the "
        "arguments: AutoModelForImageClassification.from_pretrained(..., model_args={...}). If you changed it by "
        "hand, undo that (model.reset_classifier puts back a plain head), or train it in a loop of your own."
    )


def _likely_arguments(model: Any) -> list[dict[str, Any]]:
    """List arguments that `timm.create_model` may have had: only layers made for one image size show them."""
    sizes = (getattr(module, "img_size", None) for module in model.modules())
    size = next((size for size in sizes if size is not None), None)
    return [{}] if size is None else [{}, {"img_size": list(size) if isinstance(size, tuple) else size}]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in without_statistics(model.state_dict()).items()}


def _computes_alike(stock: nn.Module, model: Any, arguments: dict[str, Any]) -> bool:
    """Check whether a timm model gives its head the features that the one without weights, `stock`, would give.

    Poolings, activations, strides and whatever else was passed to `timm.create_model` show in no tensor's shape.
    """
    weights = without_statistics({**dict(model.named_parameters()), **dict(model.named_buffers())})
    if is_sharded(model) or any(tensor.is_meta for tensor in weights.values()):
        return True
    first = next(model.parameters())
    side = arguments.get("img_size") or model.pretrained_cfg["input_size"][1:]
    sides = (side, side) if isinstance(side, int) else side
    image = torch.randn(1, 3, *sides, generator=torch.Generator().manual_seed(0)).to(first)
    read: list[Tensor] = []
    with torch.no_grad(), restored_modes(model), ExitStack() as stack:
        for part in (stock.eval(), model.eval()):
            hook = find_heads(part)[0].module.register_forward_pre_hook(lambda _, args: read.append(args[0]))
            stack.callback(hook.remove)
        try:
            functional_call(stock, weights, (image,))
            model(image)
        # What a layer computes when it is built is not there, or the model takes other inputs: nothing to compare.
        except (RuntimeError, TypeError, ValueError, AssertionError):
            return True
    expected, features = (values.cpu().double() for values in read)
    # Half of the digits: another order of sums is no other computation. Weights that overflow are no reason either.
    return not (expected - features).norm() > math.sqrt(torch.finfo(first.dtype).eps) * features.norm()
