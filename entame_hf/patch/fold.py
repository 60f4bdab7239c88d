"""Take ENTAME out of a model again: fold feature normalisation into its classifiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..errors import InputError
from ..heads import TIMM_PREFIX, base_model, is_peft, timm_model
from ..layers import ZNorm, ZNormConv2d, ZNormLeaf, ZNormLinear
from .gathering import gathered_parameters, is_sharded, reshard

ModelT = TypeVar("ModelT", bound=nn.Module)

# In float64 a head of many classes would be several times as large as itself.
CLASSES_AT_ONCE = 64

NO_BIAS = (
    "{path} has no bias, and the mean of its features folds into one: stock code would drop it and give other logits. "
    'Use entame_method="mei", which does not normalise features.'
)


def fold_entame(model: ModelT) -> ModelT:
    """Fold feature normalisation into the classifiers: the stock model again, with the same logits in eval mode.

    Args:
        model (`torch.nn.Module`): changed in place; a model without normalised heads is left as it is.

    Returns:
        `torch.nn.Module`: `model` itself. A head that had no bias gets one where its features were normalised. A model
        that ZeRO-3 or FSDP2 has sharded stays so: call this on every process.

    Raises:
        InputError: a head without a bias is sharded.

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
        if leaf.bias is None and is_sharded(leaf):
            raise InputError(f"{path} has no bias, and cannot get one while it is sharded: fold the model before.")
    for _, leaf in heads:
        fold_leaf(leaf)
    for mark in ("entame_config", "save_pretrained"):
        vars(model).pop(mark, None)
    return model


def folded_parameters(
    weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the weight and bias of the stock classifier that equals one over normalised features.

    Args:
        weight (`torch.Tensor` of shape `(C, K, *)`): the classifier's.
        bias (`torch.Tensor` of shape `(C,)`, *optional*): the classifier's.
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


def stock_state_dict(model: nn.Module, state_dict: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Build the state dict of the stock model: heads folded, no statistics, timm's own names for timm's models.

    Args:
        model (`torch.nn.Module`): the model in training; it is left as it is.
        state_dict (`dict[str, torch.Tensor]`, *optional*): gathered from shards, or folded already.

    Returns:
        `dict[str, torch.Tensor]`: the folded heads are new tensors, all others are the model's.

    Raises:
        InputError: a head over normalised features has no bias, so the stock model cannot give its logits.
    """
    state = dict(model.state_dict() if state_dict is None else state_dict)
    for path, leaf in normalised_heads(model):
        if f"{path}.znorm.mean" not in state:
            continue  # It was folded before.
        if leaf.bias is None:
            raise InputError(NO_BIAS.format(path=path))
        mean, var = state.pop(f"{path}.znorm.mean"), state.pop(f"{path}.znorm.var")
        state.pop(f"{path}.znorm.largest_batch")
        state[f"{path}.weight"], state[f"{path}.bias"] = folded_parameters(
            state[f"{path}.weight"], state.get(f"{path}.bias"), mean, var, leaf.znorm.eps
        )
    if isinstance(model, PreTrainedModel) and timm_model(model) is not None:
        # timm loads strictly and knows no prefix; transformers loads both.
        state = {name.removeprefix(TIMM_PREFIX): tensor for name, tensor in state.items()}
    return state


def patch_save_pretrained(model: nn.Module) -> None:
    """Make `model.save_pretrained`, and so `push_to_hub`, write the stock model while its heads are normalised.

    As they are, plain `from_pretrained` would drop the statistics with a remark, and give other logits.
    """
    for part in {model, base_model(model)}:
        if hasattr(type(part), "save_pretrained"):
            # Copies and pickles of a partial object refer to the copied model; those of a bound method to its class.
            vars(part)["save_pretrained"] = partial(_save_pretrained, part)


def _save_pretrained(
    model: Any, save_directory: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
) -> Any:
    if is_peft(model):
        # What peft writes is named by its layers' own state dicts.
        with folded(model):
            return type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if state_dict is None:
        reshard(model)
        if is_sharded(model):
            raise InputError(
                "The model is sharded over processes, and a part of it would be saved. Gather it on every process: "
                "model.save_pretrained(..., state_dict=accelerator.get_state_dict(wrapped_model))."
            )
    state = stock_state_dict(model, state_dict)
    return type(model).save_pretrained(model, save_directory, *args, state_dict=state, **kwargs)


@contextmanager
def folded(model: nn.Module) -> Iterator[None]:
    """Let a model be its stock self while this context lasts, and bit for bit what it was afterwards."""
    kept = [(leaf, leaf.znorm, leaf.weight.detach().clone(), leaf.bias) for _, leaf in normalised_heads(model)]
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
            normalise_leaf(leaf, znorm)


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


def normalise_leaf(leaf: Any, znorm: ZNorm) -> None:
    """Make a leaf of torch's classes normalise its input; its parameters stay as they are."""
    leaf.znorm = znorm
    leaf.__class__ = ZNormLinear if isinstance(leaf, nn.Linear) else ZNormConv2d


def to_stock(leaf: nn.Module) -> None:
    """Make a leaf an instance of torch's class again; its parameters stay as they are."""
    del leaf.znorm
    stock: type[nn.Module] = nn.Linear if isinstance(leaf, nn.Linear) else nn.Conv2d
    # One that FSDP2 shards by itself has FSDP2's methods, which its root calls.
    leaf.__class__ = type(f"FSDP{stock.__name__}", (FSDPModule, stock), {}) if isinstance(leaf, FSDPModule) else stock
