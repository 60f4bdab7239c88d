"""Fold feature normalisation into the classifiers: the stock model again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..errors import InputError
from ..heads import TIMM_PREFIX, Leaf, has_adapters, timm_model, wrapped_models
from ..layers import ZNorm, ZNormConv2d, ZNormLeaf, ZNormLinear
from .gathering import gathered_parameters, is_sharded, reshard
from .state import clear_config

ModelT = TypeVar("ModelT", bound=nn.Module)

# The whole head of a model with many classes in float64 would need several times its memory.
CLASSES_AT_ONCE = 64


def fold_entame(model: ModelT) -> ModelT:
    """Fold feature normalisation into the classifiers: the stock model again, with the same logits in eval mode.

    Args:
        model (`torch.nn.Module`):
            Changed in place; wrappers of torch.compile, DDP and peft may be around it. A model without normalised
            heads stays as it is. One that ZeRO-3 or FSDP2 has sharded stays sharded: call this on every process.

    Returns:
        `torch.nn.Module`: `model` itself. A normalised head without a bias gets one.

    Raises:
        InputError: a head has no values on this device, its weight is shared or computed, its `forward` was replaced,
            or it has no bias and is sharded.

    Example:

    ```python
    >>> import timm
    >>> from entame_hf import apply_entame, fold_entame

    >>> fold_entame(apply_entame(timm.create_model("resnet18"), num_labels=10)).fc
    Linear(in_features=512, out_features=10, bias=True)
    ```
    """
    reshard(model)
    heads = list(normalised_heads(model))
    for path, leaf in heads:
        check_weight(model, path, leaf)
        check_forward(path, leaf)
        if leaf.weight.is_meta:
            raise InputError(f"`{path}` is on the meta device, or offloaded: load its weights before you fold.")
        if leaf.bias is None and is_sharded(leaf):
            raise InputError(f"`{path}` has no bias, and cannot get one while it is sharded: fold before you shard.")
    for _, leaf in heads:
        fold_leaf(leaf)
    for module in model.modules():
        clear_config(module)
    for part in wrapped_models(model):
        vars(part).pop("entame_batches", None)
        if not (isinstance(part, PreTrainedModel) and timm_model(part) is not None):
            vars(part).pop("save_pretrained", None)
    return model


def folded_parameters(
    weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the weight and bias of the stock classifier that equals one over normalised features.

    Args:
        weight (`torch.Tensor` of shape `(C, K, *)`): the classifier's weight.
        bias (`torch.Tensor` of shape `(C,)`, *optional*): the classifier's bias.
        mean (`torch.Tensor` of shape `(K,)`): stored mean μ̂.
        var (`torch.Tensor` of shape `(K,)`): stored variance σ̂².
        eps (`float`): added to the variance under the root.

    Returns:
        `tuple` of weight `W / sqrt(σ̂² + ε)` and bias `b − W μ̂ / sqrt(σ̂² + ε)`, computed in float64, in the dtype
        of `weight`.
    """
    scale, mean = torch.rsqrt(var.double() + eps), mean.double()
    folded = torch.empty_like(weight, memory_format=torch.contiguous_format)
    shift = torch.empty(len(weight), dtype=torch.float64, device=weight.device)
    for start in range(0, len(weight), CLASSES_AT_ONCE):
        rows = slice(start, start + CLASSES_AT_ONCE)
        exact = weight.detach()[rows].flatten(1).double() * scale
        shift[rows] = exact @ mean
        folded[rows] = exact.view(weight[rows].shape)
    before = torch.zeros_like(shift) if bias is None else bias.detach().double()
    return folded, (before - shift).to(weight.dtype)


def check_bias(path: str, leaf: Leaf | ZNormLeaf) -> None:
    """Refuse to save a head over normalised features that has no bias for their mean to be folded into."""
    if leaf.bias is None:
        raise InputError(
            f"`{path}` has no bias, and the mean of its features folds into one: stock code would drop it and give "
            'other logits. Use `entame_method="mei"`, which does not normalise features.'
        )


def check_weight(model: nn.Module, path: str, leaf: Leaf | ZNormLeaf) -> None:
    """Refuse a head whose weight is no parameter of its own, so that drawing or folding it could not stay in it."""
    weight = leaf._parameters.get("weight")
    if weight is None:
        raise InputError(
            f"`{path}.weight` is computed from other parameters (prune, weight_norm, spectral_norm, parametrize), so "
            "it cannot be drawn or folded. Remove that first: torch.nn.utils.parametrize.remove_parametrizations("
            f'model.{path}, "weight"), torch.nn.utils.remove_weight_norm(model.{path}) or '
            f'torch.nn.utils.prune.remove(model.{path}, "weight").'
        )
    for name, module in model.named_modules():
        if module is not leaf and any(parameter is weight for parameter in module._parameters.values()):
            raise InputError(
                f"`{path}.weight` is shared with `{name}`, which drawing or folding it would change too. Give the "
                f"head its own: model.{path}.weight = torch.nn.Parameter(model.{path}.weight.detach().clone())."
            )


def check_forward(path: str, leaf: nn.Module) -> None:
    """Refuse a head whose `forward` was replaced on the instance: another class would not be called.

    Hooks of accelerate (`device_map`, `dispatch_model`) are no obstacle, see [`set_class`].
    """
    if "forward" in vars(leaf) and "_hf_hook" not in vars(leaf) and not _is_own_forward(leaf):
        raise InputError(
            f"`{path}.forward` was replaced on the instance, so normalising or folding could have no effect. "
            f"Type del model.{path}.forward, and use register_forward_hook instead; or leave features as they are: "
            "EntameConfig(feature_norm=False)."
        )


def stock_state_dict(model: nn.Module, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Build the state dict of the stock model: heads folded, no statistics, timm's own names for timm's models.

    Args:
        model (`torch.nn.Module`): the model in training; it stays as it is.
        state_dict (`dict[str, torch.Tensor]`, *optional*): the model's, gathered from shards, or folded already.

    Returns:
        `dict[str, torch.Tensor]`: the folded heads are new tensors, all others are the model's.

    Raises:
        InputError: a head over normalised features has no bias, or a weight that is shared or computed, so the stock
            model cannot give its logits.
    """
    state = dict(model.state_dict() if state_dict is None else state_dict)
    for path, leaf in normalised_heads(model):
        if f"{path}.znorm.mean" not in state:
            continue  # It was folded before.
        check_bias(path, leaf)
        check_weight(model, path, leaf)
        weight, bias = state[f"{path}.weight"], state.get(f"{path}.bias")
        statistics = {name: state.pop(f"{path}.znorm.{name}") for name in leaf.znorm.state_dict()}
        state[f"{path}.weight"], state[f"{path}.bias"] = folded_parameters(
            weight, bias, statistics["mean"], statistics["var"], leaf.znorm.eps
        )
    if isinstance(model, PreTrainedModel) and timm_model(model) is not None and not has_adapters(model):
        # timm loads strictly and knows no prefix; transformers loads both.
        state = {name.removeprefix(TIMM_PREFIX): tensor for name, tensor in state.items()}
    return state


@contextmanager
def folded(model: nn.Module) -> Iterator[None]:
    """Fold a model while this context lasts. Afterwards it is bit for bit what it was."""
    heads = list(normalised_heads(model))
    for path, leaf in heads:
        check_bias(path, leaf)
        check_weight(model, path, leaf)
        check_forward(path, leaf)
    kept = [(leaf, leaf.znorm, leaf.weight.detach().clone(), leaf.bias) for _, leaf in heads]
    biases = [None if bias is None else bias.detach().clone() for *_, bias in kept]
    for leaf, *_ in kept:
        fold_leaf(leaf)
    try:
        yield
    finally:
        for (leaf, znorm, weight, bias), before in zip(kept, biases, strict=True):
            with torch.no_grad():
                leaf.weight.copy_(weight)
                if bias is not None:
                    bias.copy_(before)
            leaf.bias = bias
            to_znorm(leaf, znorm)


def normalised_heads(model: nn.Module) -> Iterator[tuple[str, ZNormLeaf]]:
    """Iterate over the paths and leaves of the heads that normalise their input."""
    for path, module in model.named_modules():
        if isinstance(module, ZNormLeaf):
            yield path, module


def fold_leaf(leaf: ZNormLeaf) -> None:
    """Fold one head in place."""
    with torch.no_grad(), gathered_parameters(leaf):
        weight, bias = folded_parameters(leaf.weight, leaf.bias, leaf.znorm.mean, leaf.znorm.var, leaf.znorm.eps)
        leaf.weight.copy_(weight)
        if leaf.bias is None:
            leaf.bias = nn.Parameter(bias)
        else:
            leaf.bias.copy_(bias)
    to_stock(leaf)


def to_znorm(leaf: Any, znorm: ZNorm) -> None:
    """Let a leaf of torch's classes normalise its input; its parameters stay as they are."""
    leaf.znorm = znorm
    set_class(leaf, ZNormLinear if isinstance(leaf, nn.Linear) else ZNormConv2d)


def to_stock(leaf: nn.Module) -> None:
    """Make a leaf an instance of torch's class again; its parameters stay as they are."""
    del leaf.znorm
    stock: type[nn.Module] = nn.Linear if isinstance(leaf, nn.Linear) else nn.Conv2d
    # One that FSDP2 shards by itself has FSDP2's methods, which its root calls.
    sharded = isinstance(leaf, FSDPModule)
    set_class(leaf, type(f"FSDP{stock.__name__}", (FSDPModule, stock), {}) if sharded else stock)


def set_class(leaf: nn.Module, new: type[nn.Module]) -> None:
    """Exchange the class of a leaf, and hook accelerate's hook to the new class's `forward`.

    accelerate replaces `forward` on the instance, which then calls that of the class before, and leaves that one there
    when its hook is removed.
    """
    hook = vars(leaf).get("_hf_hook")
    if hook is not None:
        remove_hook_from_module(leaf)
    if _is_own_forward(leaf):
        del vars(leaf)["forward"]
    leaf.__class__ = new
    if hook is not None:
        add_hook_to_module(leaf, hook)


def _is_own_forward(leaf: nn.Module) -> bool:
    """Check whether the `forward` on an instance is nothing but its class's."""
    return getattr(vars(leaf).get("forward"), "__func__", None) is type(leaf).forward
