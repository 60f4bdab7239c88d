"""Put ENTAME into a model."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..config import EntameConfig
from ..errors import InputError
from ..heads import Head, Leaf, find_heads, is_peft, num_classes, num_features
from ..layers import ZNorm, ZNormConv2d, ZNormLeaf, ZNormLinear
from .fold import fold_leaf, normalise_leaf, to_stock
from .gathering import gathered_parameters, is_zero3_sharded, reshard
from .state import applied_config, clear_entame_state, has_trained_head, set_applied

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
    """Initialise a classifier's heads to maximum entropy and normalise what they are fed, in place.

    Every tensor but the heads' weights and biases stays bit-identical, and every parameter remains the same object
    under the same name, so optimizers and adapters that refer to it go on working. Applying the same configuration
    again changes nothing.

    Args:
        model (`torch.nn.Module`): see [`find_heads`].
        config ([`EntameConfig`], *optional*): defaults to the paper's: maximum-entropy head, normalised features.
        num_labels (`int`, *optional*):
            Rebuild the heads for this many classes first, `config.num_labels`, `num_classes` and label maps
            included. Under `init="keep"` a rebuilt head is drawn from N(0, 0.02²).
        learning_rate (`float`, *optional*): γ, the peak learning rate; needed with `noise_lambda` only.
        generator (`torch.Generator`, *optional*):
            A CPU generator to draw from, so that a seed gives the same head on every device; the heads are then
            drawn anew even if the same configuration was applied before. Defaults to torch's global generator.

    Returns:
        `torch.nn.Module`: `model` itself.

    Raises:
        ValueError: no head was found, the model is a regression model, its weights are on the meta device or sharded
            by FSDP, or its config says that it was adapted already and the new head would wipe the old one.

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
    if num_labels is not None and is_peft(model):
        raise InputError("Adapters hold copies of the head: call apply_entame(..., num_labels=...) before peft.")
    for head in heads:
        _check(head, config, num_labels)
    adapted = has_trained_head(model)
    if num_labels is not None and (adapted or any(num_classes(head.module) != num_labels for head in heads)):
        _resize(model, heads, num_labels, generator)
    elif applied_config(model) == config and generator is None and not adapted:
        return model
    elif config.init != "keep" and num_labels is None and adapted:
        raise InputError(
            "This model was adapted with ENTAME before, and a new head would wipe what its head has learned. "
            'Pass EntameConfig(init="keep") (--entame_method keep) to go on from its head, or '
            "apply_entame(model, num_labels=...) to start a new one."
        )
    set_feature_norm(heads, config)
    if config.init != "keep":
        for head in heads:
            _draw(head.module, _std(head.module, config, learning_rate), generator)
    set_applied(model, config)
    if config.init == "ridge" and generator is None:
        logger.warning_once(
            "The head is drawn at maximum entropy until it is fitted: call fit_head(model, batches) before training. "
            "EntameTrainer does so by itself."
        )
    if num_labels is not None:
        clear_entame_state(model)
    return model


def _check(head: Head, config: EntameConfig, num_labels: int | None) -> None:
    leaf = head.module
    classes = num_classes(leaf) if num_labels is None else num_labels
    if classes < 1:
        raise InputError(f"num_labels={classes} is no number of classes: use two or more.")
    if classes < 2:
        raise InputError(
            f"{head.path} would have one output: that is regression, and ENTAME is about the entropy over classes. "
            "Use two outputs for a binary task: num_labels=2."
        )
    if leaf.weight.is_meta:
        raise InputError(f"{head.path} is on the meta device and has no values yet: load the weights, then apply.")
    if isinstance(leaf.weight, DTensor):
        raise InputError(f"{head.path} is sharded already: apply ENTAME first, then shard the model.")
    if is_zero3_sharded(leaf) and num_labels is not None:
        raise InputError(
            f"{head.path} is partitioned by DeepSpeed already. Rebuild it while it is loaded: "
            "from_pretrained(..., num_labels=..., ignore_mismatched_sizes=True)."
        )
    carried = config.init == "keep" and config.feature_norm and not isinstance(leaf, ZNormLeaf)
    if carried and is_zero3_sharded(leaf):
        raise InputError(
            f"{head.path} is partitioned by DeepSpeed already, and what it has learned cannot be carried over to "
            'normalised features. Pass EntameConfig(init="keep", feature_norm=False).'
        )
    if config.feature_norm and not _is_plain(leaf):
        raise InputError(
            f"{head.path} is a {type(leaf).__name__}, which may compute more than a Linear or a Conv2d: its input "
            "cannot be normalised. Pass EntameConfig(feature_norm=False), or put a plain layer in its place."
        )
    if config.feature_norm and head.path.endswith(".base_layer"):
        raise InputError(
            f"{head.path} is adapted by LoRA, which would read features that are not normalised. Name the head in "
            'modules_to_save instead of target_modules, or pass EntameConfig.for_method("mei").'
        )
    if carried and leaf.bias is None:
        raise InputError(
            f"{head.path} has no bias, so what it has learned cannot be carried over to normalised features. "
            'Pass EntameConfig(init="keep", feature_norm=False).'
        )


def _is_plain(leaf: Leaf) -> bool:
    """Tell whether a leaf computes what torch's own layers do."""
    if type(leaf) in (nn.Linear, nn.Conv2d, ZNormLinear, ZNormConv2d):
        return True
    # Imported where it is needed: timm would be half of what importing this package costs.
    from timm.layers import Linear

    # It differs from torch's in TorchScript alone.
    return type(leaf) is Linear


def _std(leaf: Leaf, config: EntameConfig, learning_rate: float | None) -> float:
    classes = num_classes(leaf)
    # He's fan-out of a classifier is C: kernels are 1×1.
    variance = 2 / classes if config.init == "he_fan_out" else config.weight_variance(classes, learning_rate)
    return math.sqrt(variance)


@torch.no_grad()
def _draw(leaf: Leaf, std: float, generator: torch.Generator | None) -> None:
    with gathered_parameters(leaf):
        # transformers' own initialisers do nothing to loaded tensors; and drawing on the CPU makes devices agree.
        leaf.weight.copy_(torch.empty(leaf.weight.shape).normal_(0, std, generator=generator))
        if leaf.bias is not None:
            leaf.bias.zero_()


def _resize(model: nn.Module, heads: list[Head], num_labels: int, generator: torch.Generator | None) -> None:
    """Give every head `num_labels` outputs, drawn as transformers would, and tell everybody who counts them."""
    before = {num_classes(head.module) for head in heads}
    for head in heads:
        leaf = head.module
        leaf.weight = _empty_like(leaf.weight, num_labels)
        if leaf.bias is not None:
            leaf.bias = _empty_like(leaf.bias, num_labels)
        setattr(leaf, "out_features" if isinstance(leaf, nn.Linear) else "out_channels", num_labels)
        _draw(leaf, REBUILT_STD, generator)
    for module in model.modules():
        for name in ("num_classes", "num_labels"):
            if vars(module).get(name) in before:
                setattr(module, name, num_labels)
    if isinstance(model, PreTrainedModel):
        # The setter makes label maps of the new length.
        model.config.num_labels = num_labels


def _empty_like(parameter: Tensor, rows: int) -> nn.Parameter:
    return nn.Parameter(parameter.new_empty((rows, *parameter.shape[1:])), requires_grad=parameter.requires_grad)


def set_feature_norm(heads: list[Head], config: EntameConfig) -> None:
    """Make the heads normalise their input, or not, as the configuration says; no weight is drawn.

    The class of a leaf is exchanged and the leaf itself stays: parameters, hooks, aliases and references survive.
    A head that is kept gives the same logits as before.
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
    )
    if config.init == "keep":
        znorm.set_identity_()
        znorm.unfold_next = True
    normalise_leaf(leaf, znorm.train(leaf.training))
