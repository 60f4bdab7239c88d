"""Put ENTAME into a model: draw its heads and normalise their features."""

from __future__ import annotations

import math
from numbers import Integral
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..config import EntameConfig
from ..errors import InputError
from ..heads import Head, Leaf, base_model, disagreement, find_heads, has_adapters, num_classes, num_features
from ..layers import ZNorm, ZNormConv2d, ZNormLeaf, ZNormLinear
from .fold import check_forward, check_weight, fold_leaf, to_stock, to_znorm
from .gathering import gathered_parameters, is_zero3_sharded, reshard
from .saving import lora_on_normalised, patch_save_pretrained
from .state import (
    clear_config,
    clear_entame_state,
    frozen_head,
    has_config,
    has_learned,
    is_saved_head,
    loaded_heads,
    set_config,
    start_check,
)

logger = logging.get_logger(__name__)

ModelT = TypeVar("ModelT", bound=nn.Module)

# What transformers' `initializer_range` and timm's heads have in common.
REBUILT_STD = 0.02


def apply_entame(
    model: ModelT,
    config: EntameConfig | None = None,
    *,
    num_labels: int | None = None,
    learning_rate: float | None = None,
    generator: torch.Generator | None = None,
) -> ModelT:
    """Initialise a classifier's heads to maximum entropy and normalise their features, in place.

    Every tensor but the heads' weights and biases stays bit-identical, and every parameter remains the same object
    under the same name, so optimizers and adapters that refer to it still work. Heads that have this configuration
    already stay as they are. Apply to the model that you save, not to a part of it.

    Args:
        model (`torch.nn.Module`): see [`find_heads`].
        config ([`EntameConfig`], *optional*): defaults to the paper's: maximum-entropy head, normalised features.
        num_labels (`int`, *optional*):
            Rebuild the heads for this many classes first, `config.num_labels`, `num_classes` and label maps
            included. Under `init="keep"` a rebuilt head is drawn from N(0, 0.02²), also where it has as many outputs
            already.
        learning_rate (`float`, *optional*): γ, the peak learning rate; needed with `noise_lambda` only.
        generator (`torch.Generator`, *optional*):
            A CPU generator, so that a seed gives the same head on every device. All heads are drawn anew, also those
            that have this configuration already. Defaults to torch's global generator.

    Returns:
        `torch.nn.Module`: `model` itself.

    Raises:
        InputError: no head is found, or a head cannot be drawn or normalised: it is frozen, sharded, without values,
            no plain layer, for regression, or already trained with ENTAME.

    Example:

    ```python
    >>> import timm
    >>> from entame_hf import apply_entame

    >>> model = apply_entame(timm.create_model("resnet18"), num_labels=10)
    >>> model.fc
    ZNormLinear(
      in_features=512, out_features=10, bias=True
      (znorm): ZNorm(512, eps=1e-05, momentum=1.0, sync=True)
    )
    ```

    Source: section 5 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """
    config = config or EntameConfig()
    reshard(model)
    heads = find_heads(model, config.head)
    base = base_model(model)
    if num_labels is not None and has_adapters(model):
        raise InputError("Adapters hold copies of the head: call apply_entame(..., num_labels=...) before peft.")
    if isinstance(base, PreTrainedModel) and base.config.problem_type == "regression":
        raise InputError(
            '`config.problem_type="regression"` asks for numbers, and ENTAME is about the entropy over classes. If '
            'labels are classes, type model.config.problem_type = "single_label_classification".'
        )
    for head in heads:
        _check(model, head, config, num_labels)
    loaded = loaded_heads(model, heads)
    trained = {head.path for head in heads if has_learned(head.module) or is_saved_head(base, head.module)} | {*loaded}
    if num_labels is None:
        _check_labels(base, heads)
    elif trained or _must_rebuild(base, heads, config, num_labels):
        _resize(model, heads, num_labels, generator)
        clear_entame_state(model)
        trained = set()
    noted = {head.path for head in heads if has_config(head.module, config)} if generator is None else set()
    # Whoever runs a cell of a notebook again keeps a head that an own loop has trained.
    noted -= {head.path for head in heads if vars(head.module).get("entame_trained")}
    drawn = [head for head in heads if head.path not in noted]
    wiped = [head.path for head in drawn if head.path in trained and config.init != "keep"]
    if wiped:
        why = "has learned in this adapter" if wiped[0] in loaded else "was adapted with ENTAME before"
        new = "add an adapter to the base model" if loaded else "apply_entame(model, num_labels=...)"
        raise InputError(
            f"`{wiped[0]}` {why}, and a new head would wipe what it has learned. Keep it: "
            f'EntameConfig(init="keep") or `entame_method="keep"`; or start a new one: {new}.'
        )
    set_feature_norm(drawn, config)
    for head in drawn:
        if config.init != "keep":
            _draw(head.module, _std(head.module, config, learning_rate), generator)
        _note(head, config, head.path in trained)
    patch_save_pretrained(model)
    if drawn and config.init == "ridge" and generator is None:
        logger.warning_once(
            "The head is drawn at maximum entropy until it is fitted: call fit_head(model, batches) before training. "
            "EntameTrainer does so by itself."
        )
    return model


def set_applied(model: nn.Module, config: EntameConfig) -> None:
    """Note on heads of a config's structure that it is applied to them, and save the model folded from now on."""
    for head in find_heads(model, config.head):
        _note(head, config, has_learned(head.module))
    patch_save_pretrained(model)


def _note(head: Head, config: EntameConfig, trained: bool) -> None:
    set_config(head.module, config)
    if trained:
        vars(head.module)["entame_trained"] = True
    elif config.init != "keep" and not head.path.endswith(".base_layer"):
        start_check(head.path, head.module)


def _must_rebuild(base: nn.Module, heads: list[Head], config: EntameConfig, num_labels: int) -> bool:
    """Check whether `num_labels` asks for other heads than a model has."""
    if any(num_classes(head.module) != num_labels for head in heads):
        return True
    if isinstance(base, PreTrainedModel) and base.config.num_labels != num_labels:
        return True
    # A head that is drawn needs no rebuilding. One that is kept would know other classes.
    return config.init == "keep" and not all(has_config(head.module, config) for head in heads)


def _check_labels(base: nn.Module, heads: list[Head]) -> None:
    """Refuse a head that was replaced by one for another number of classes than the config has."""
    for head in heads:
        if isinstance(base, PreTrainedModel) and num_classes(head.module) != base.config.num_labels:
            raise InputError(disagreement(head.path, num_classes(head.module), base.config.num_labels))


def _check(model: nn.Module, head: Head, config: EntameConfig, num_labels: int | None) -> None:
    path, leaf = f"`{head.path}`", head.module
    classes = num_classes(leaf) if num_labels is None else num_labels
    if not isinstance(classes, Integral) or classes < 1:
        raise InputError(f"`num_labels={classes!r}` is no number of classes: use two or more.")
    if classes < 2:
        raise InputError(
            f"{path} would have one output: that is regression, and ENTAME is about the entropy over classes. "
            "Use two outputs for a binary task: `num_labels=2`."
        )
    check_weight(model, head.path, leaf)
    if leaf.weight.is_meta:
        raise InputError(f"{path} is on the meta device, or offloaded: load its weights on one device, then apply.")
    if isinstance(leaf.weight, DTensor):
        raise InputError(f"{path} is sharded already: apply ENTAME first, then shard the model.")
    # An adapter on a frozen head learns in its place.
    if config.init != "keep" and not leaf.weight.requires_grad and not head.path.endswith(".base_layer"):
        raise InputError(frozen_head(head.path))
    if is_zero3_sharded(leaf) and num_labels is not None:
        raise InputError(
            f"{path} is sharded by DeepSpeed already. Rebuild it while the model is loaded: "
            "from_pretrained(..., num_labels=..., ignore_mismatched_sizes=True)."
        )
    carried = config.init == "keep" and config.feature_norm and not isinstance(leaf, ZNormLeaf)
    if carried and is_zero3_sharded(leaf):
        raise InputError(
            f"{path} is sharded by DeepSpeed already, and what it has learned cannot be carried over to "
            'normalised features. Pass EntameConfig(init="keep", feature_norm=False).'
        )
    if config.feature_norm and not _is_plain(leaf):
        raise InputError(
            f"{path} is a {type(leaf).__name__}, which may compute more than a Linear or a Conv2d: its input "
            "cannot be normalised. Pass EntameConfig(feature_norm=False), or put a plain layer in its place."
        )
    if config.feature_norm or isinstance(leaf, ZNormLeaf):
        check_forward(head.path, leaf)
    if config.feature_norm and head.path.endswith(".base_layer"):
        raise InputError(lora_on_normalised(head.path))
    if carried and leaf.bias is None:
        raise InputError(
            f"{path} has no bias, so what it has learned cannot be carried over to normalised features. "
            'Pass EntameConfig(init="keep", feature_norm=False).'
        )


def _is_plain(leaf: Leaf) -> bool:
    """Check whether a leaf computes what torch's own layers compute."""
    if type(leaf) in (nn.Linear, nn.Conv2d, ZNormLinear, ZNormConv2d):
        return True
    # Imported here: timm takes half of the time that importing this package takes.
    from timm.layers import Linear

    # It differs from torch's in TorchScript only.
    return type(leaf) is Linear


def _std(leaf: Leaf, config: EntameConfig, learning_rate: float | None) -> float:
    classes = num_classes(leaf)
    # He's fan-out of a classifier is C: kernels are 1×1.
    variance = 2 / classes if config.init == "he_fan_out" else config.weight_variance(classes, learning_rate)
    return math.sqrt(variance)


@torch.no_grad()
def _draw(leaf: Leaf, std: float, generator: torch.Generator | None) -> None:
    with gathered_parameters(leaf):
        # transformers' own initialisers skip loaded tensors, and a draw on the CPU is the same on every device.
        leaf.weight.copy_(torch.empty(leaf.weight.shape).normal_(0, std, generator=generator))
        if leaf.bias is not None:
            leaf.bias.zero_()


def _resize(model: nn.Module, heads: list[Head], num_labels: int, generator: torch.Generator | None) -> None:
    """Give every head `num_labels` outputs, drawn as transformers draws them, and update whatever counts them."""
    base = base_model(model)
    before: set[int | None] = {num_classes(head.module) for head in heads}
    for head in heads:
        leaf = head.module
        for parameter in (leaf.weight, leaf.bias):
            if parameter is not None:
                # The object stays: an optimizer that was built before would train what is no longer in the model.
                parameter.grad, parameter.data = None, parameter.data.new_empty((num_labels, *parameter.shape[1:]))
        setattr(leaf, "out_features" if isinstance(leaf, nn.Linear) else "out_channels", num_labels)
        _draw(leaf, REBUILT_STD, generator)
        clear_config(leaf)
    if isinstance(base, PreTrainedModel):
        before.add(base.config.num_labels)
        # The setter makes label maps of the new length.
        base.config.num_labels = num_labels
    for module in model.modules():
        for name in ("num_classes", "num_labels"):
            if vars(module).get(name) in before:
                setattr(module, name, num_labels)


def set_feature_norm(heads: list[Head], config: EntameConfig) -> None:
    """Let heads normalise their input, or not, as a configuration says; no weight is drawn.

    The class of a leaf is exchanged and the leaf itself stays, with its parameters and hooks. A kept head gives the
    same logits as before.
    """
    for head in heads:
        leaf = head.module
        if isinstance(leaf, ZNormLeaf) and config.init != "keep":
            to_stock(leaf)
        if isinstance(leaf, ZNormLeaf) and config.feature_norm:
            leaf.znorm.eps, leaf.znorm.momentum, leaf.znorm.sync = config.eps, config.momentum, config.sync
        elif isinstance(leaf, ZNormLeaf):
            fold_leaf(leaf)
        elif config.feature_norm:
            _normalise_input(leaf, config)


def _normalise_input(leaf: Leaf, config: EntameConfig) -> None:
    znorm = ZNorm(
        num_features(leaf),
        eps=config.eps,
        momentum=config.momentum,
        sync=config.sync,
        dim=-1 if isinstance(leaf, nn.Linear) else -3,
        device=leaf.weight.device,
        dtype=leaf.weight.dtype,
    )
    if config.init == "keep":
        znorm.set_identity_()
        znorm.unfold_next = True
    to_znorm(leaf, znorm.train(leaf.training))
