"""State that ENTAME leaves on a model. This is the complete list.

On each head, so that it disappears with the head:

- The class is [`ZNormLinear`] or [`ZNormConv2d`], with a submodule `znorm`, where features are normalised. Folding
  restores torch's class.
- `entame_config` ([`EntameConfig`]): how the head was drawn. Feature normalisation, `eps`, `momentum` and `sync` are
  read from the head itself. Folding removes it.
- `entame_trained` (`bool`): True if a new head would wipe what this one has learned, False if a new one is wanted.
  Without it, a randomly drawn head has learned something once its bias is not zero.
- `entame_check`: whether a forward hook refuses a new head that was frozen since, or whose training in eval mode
  normalises nothing. Its first training forward, LoRA around the head and folding remove it.
- `_load_from_state_dict`: removes these notes, and itself, when the weights of a stock or folded head are loaded.

On a model with adapters, `entame_batches`: how many batches the running statistics that adapters do not hold had seen.

On the model given, on the model inside it and on a `PeftModel` around it:

- `save_pretrained` writes the folded model. Folding restores the class's method, except for wrapped timm models, whose
  own method writes files that timm cannot load.

For a time: `train` of frozen modules ([`frozen_backbone`], [`frozen_statistics`]); `entame` and timm's values in a
config ([`shareable_config`]). In the process: one hook of torch, which sees peft wrap a model. On disk: `entame` in
the saved config, and a note in timm's part of it.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..config import EntameConfig
from ..errors import InputError
from ..heads import Head, Leaf, base_model, find_heads, has_adapters, leaves, num_classes, timm_model
from ..layers import ZNormLeaf

logger = logging.get_logger(__name__)

# In the config of a saved timm model, where timm's own loaders read it.
_NOTE = "adapted with ENTAME, head"


def set_config(leaf: Leaf, config: EntameConfig) -> None:
    """Note on a head how it was drawn, until other weights are loaded over it."""
    vars(leaf)["entame_config"] = config
    vars(leaf).pop("entame_trained", None)
    # A partial survives copies and pickles. torch has no public hook that is deleted by name.
    vars(leaf)["_load_from_state_dict"] = partial(_load_from_state_dict, leaf)


def clear_config(leaf: nn.Module) -> None:
    """Remove what [`set_config`] noted on a head."""
    stop_check(leaf)
    for name in ("entame_config", "_load_from_state_dict"):
        vars(leaf).pop(name, None)


def _load_from_state_dict(leaf: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    stock = f"{prefix}weight" in state_dict and f"{prefix}znorm.mean" not in state_dict
    type(leaf)._load_from_state_dict(leaf, state_dict, prefix, *args)
    if stock:
        clear_config(leaf)
        for name in ("entame_trained", "_is_hf_initialized"):
            vars(leaf).pop(name, None)


def start_check(path: str, leaf: Leaf) -> None:
    """Refuse a new head that is frozen by its first training forward, or that is trained in eval mode before it."""
    stop_check(leaf)
    # The hook's handle is not kept: torch.compile cannot trace it.
    leaf.register_forward_hook(partial(_check_forward, path))
    vars(leaf)["entame_check"] = True


def stop_check(leaf: nn.Module) -> None:
    """End what [`start_check`] began: an adapter learns in the head's place, or the head has learned."""
    if vars(leaf).pop("entame_check", False):
        for key, hook in list(leaf._forward_hooks.items()):
            if isinstance(hook, partial) and hook.func is _check_forward:
                # DataParallel's replicas share the hooks.
                leaf._forward_hooks.pop(key, None)


def _check_forward(path: str, leaf: Any, args: Any, output: torch.Tensor) -> None:
    if leaf.training and torch.is_grad_enabled():
        check_learns(path, leaf)
        if torch.compiler.is_compiling():
            return
        stop_check(leaf)
        if isinstance(leaf, ZNormLeaf) and leaf.znorm.has_no_spread(args[0]):
            logger.warning_once(
                f"The first batch that `{path}` is trained on holds one image: nothing is normalised until one holds "
                'two or more. Train on larger batches, or use EntameConfig.for_method("mei").'
            )
    elif isinstance(leaf, ZNormLeaf) and output.requires_grad and not torch.compiler.is_compiling():
        # An evaluation without no_grad has no backward.
        output.register_hook(partial(_refuse_eval_mode, path, leaf))


def _refuse_eval_mode(path: str, leaf: Any, gradient: torch.Tensor) -> None:
    if "entame_check" in vars(leaf) and leaf.weight.requires_grad:
        raise InputError(
            f"`{path}` is trained in eval mode, where features are normalised by statistics that only training mode "
            "collects. Call model.train() before each training step, and eval() on what is to stay frozen, such as "
            'BatchNorm; or use EntameConfig.for_method("mei"), which does not normalise features.'
        )


def check_learns(path: str, leaf: Leaf) -> None:
    """Make sure that a new head can learn, or has learned."""
    learned = leaf.weight.requires_grad or vars(leaf).get("entame_trained") or _has_bias(leaf)
    if "entame_check" in vars(leaf) and not learned:
        raise InputError(frozen_head(path))


def frozen_head(path: str) -> str:
    """Write the message for a new head that is frozen."""
    return (
        f"`{path}` is frozen (requires_grad=False), so a new head could not learn. Type "
        f'model.get_submodule("{path}").requires_grad_(True); with peft, name it in modules_to_save; or keep it: '
        'EntameConfig.for_method("keep").'
    )


def head_config(leaf: nn.Module) -> EntameConfig | None:
    """Get the configuration of a head, as the head itself has it; None for a stock head."""
    config = vars(leaf).get("entame_config")
    if config is None or not isinstance(leaf, ZNormLeaf):
        return config and replace(config, feature_norm=False)
    znorm = leaf.znorm
    return replace(config, feature_norm=True, eps=znorm.eps, momentum=znorm.momentum, sync=znorm.sync)


def has_config(leaf: nn.Module, config: EntameConfig) -> bool:
    """Check whether a configuration is applied to a head."""
    own = head_config(leaf)
    return own is not None and replace(own, head=None) == replace(config, head=None)


def applied_config(model: nn.Module) -> EntameConfig | None:
    """Get the configuration that is applied to a model's heads; None without one, or where heads differ."""
    found = {path: config for path, leaf in leaves(model) if (config := head_config(leaf)) is not None}
    configs = set(found.values())
    if len(configs) != 1:
        return None
    (config,) = configs
    if config.head is None:
        return config
    try:
        known = {head.path for head in find_heads(model, config.head)} == set(found)
    except InputError:
        known = False
    # Paths are relative to the model given.
    return config if known else replace(config, head=tuple(found))


def differs_from_checkpoint(leaf: nn.Module) -> bool:
    """Check whether a head computes something else than the one its model was loaded with."""
    config = head_config(leaf)
    return isinstance(leaf, ZNormLeaf) or (config is not None and config.init != "keep")


def set_trained(model: nn.Module) -> None:
    """Note on a model's heads that they have learned something that a new head would wipe."""
    for _, leaf in leaves(model):
        if "entame_config" in vars(leaf):
            vars(leaf)["entame_trained"] = True


def has_learned(leaf: Leaf) -> bool:
    """Check whether a head has learned something since ENTAME has drawn it."""
    trained = vars(leaf).get("entame_trained")
    if trained is not None:
        return trained
    config = head_config(leaf)
    # A fitted head starts with a bias.
    return config is not None and config.init in ("mei", "he_fan_out") and _has_bias(leaf)


def _has_bias(leaf: Leaf) -> bool:
    """Check whether a head's bias is not zero any more, as it was drawn."""
    return leaf.bias is not None and bool(leaf.bias.detach().any())


def has_trained_head(model: nn.Module) -> bool:
    """Check whether a head was trained with ENTAME, in this process or before the model was saved."""
    base = base_model(model)
    found = [leaf for _, leaf in leaves(model)]
    if any(has_learned(leaf) or is_saved_head(base, leaf) for leaf in found):
        return True
    with suppress(InputError):
        return has_adapters(model) and bool(loaded_heads(model, find_heads(model)))
    return False


def is_saved_head(model: nn.Module, leaf: Leaf) -> bool:
    """Check whether a leaf is the head that was trained with ENTAME before `model` was saved and loaded.

    `from_pretrained` replaces a head of another number of classes, and notes `_is_hf_initialized` on all modules. A
    head that is put in its place later has no such note.
    """
    saved = getattr(model.config, "entame", None) if isinstance(model, PreTrainedModel) else None
    notes = (getattr(timm_model(model), "pretrained_cfg", None) or {}).get("notes") or ()
    if saved is None and any(str(note).startswith(_NOTE) for note in notes):
        # timm's loaders read no more than this of a saved config.
        return head_config(leaf) is None and adaptation_note(leaf.weight) in notes
    if saved is None or not vars(leaf).get("_is_hf_initialized", False) or vars(leaf).get("entame_trained") is False:
        return False
    if not isinstance(saved, dict) or "num_labels" not in saved:
        raise InputError(
            "`config.entame` is damaged: it does not say what the head was trained for. Repair config.json; or remove "
            "`entame` from it for a new head."
        )
    config = head_config(leaf)
    return saved["num_labels"] == num_classes(leaf) and (config is None or config.init == "keep")


def loaded_heads(model: nn.Module, heads: list[Head]) -> list[str]:
    """List which heads are an adapter's, differ from what peft made them of, and were not drawn by ENTAME since.

    `PeftModel.from_pretrained` loads them over copies of the base model's head.
    """
    found = []
    for path, leaf in ((head.path, head.module) for head in heads):
        before, _, after = path.partition(".modules_to_save.")
        if not after or head_config(leaf) is not None or vars(leaf).get("entame_trained") is False:
            continue
        inside = after.partition(".")[2]
        original: Any = model.get_submodule(before).original_module
        pairs = zip(original.get_submodule(inside).parameters(), leaf.parameters(), strict=False)
        if any(not a.is_meta and not b.is_meta and not torch.equal(a.to(b), b) for a, b in pairs):
            found.append(path)
    return found


def clear_entame_state(model: nn.Module) -> None:
    """Allow new heads on a model: whatever its heads have learned may be wiped."""
    for _, leaf in leaves(model):
        if "entame_config" in vars(leaf) or "entame_trained" in vars(leaf):
            vars(leaf)["entame_trained"] = False
    base = base_model(model)
    if isinstance(base, PreTrainedModel) and hasattr(base.config, "entame"):
        del base.config.entame


def adaptation_note(weight: torch.Tensor) -> str:
    """Write timm's note on a model whose head has this weight: another head in its place is new.

    The same number in float32 and in bfloat16 gives the same note.
    """
    values = weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy()
    return f"{_NOTE} {hashlib.blake2b(values.tobytes(), digest_size=6).hexdigest()}"


def without_notes(notes: Any) -> list[str]:
    """Give timm's notes on a model without those of its adaptation."""
    return [note for note in notes or () if not str(note).startswith(_NOTE)]


# Reading what is installed takes a twentieth of the time that saving a ViT-B takes.
_version = cache(version)


def describe_adaptation(
    model: nn.Module, method: str | None, learning_rate: float, head_lr: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """Describe how a model was adapted, for its saved config and its model card; None where nothing was applied to it.

    The method that was asked for is named if it matches the configuration. `head_lr` says which head learning rate was
    asked for, and which peaks were used.
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
