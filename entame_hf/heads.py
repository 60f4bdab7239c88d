"""Find the classifier heads of a model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from .errors import InputError

TIMM_PREFIX = "timm_model."

# Second heads that timm's table omits, by the first head: a distilled one, and one on auxiliary features.
TIMM_SECOND_HEADS = {"head.linear": "head_dist.linear", "fc": "AuxLogits.fc"}

# Models whose backbone itself gives the logits.
TRANSFORMERS_HEADS = {"perceiver": ["perceiver.decoder.decoder.final_layer"]}

# The attribute that holds the model in torch.compile's, DDP's (DataParallel's, DeepSpeed's) and FSDP1's wrappers.
WRAPPED = ("_orig_mod", "module", "_fsdp_wrapped_module")

Leaf = nn.Linear | nn.Conv2d


@dataclass(frozen=True)
class Head:
    """A classifier of a model.

    Args:
        path (`str`): dotted path from the model that was searched, as `model.get_submodule` takes it.
        module (`torch.nn.Linear` or `torch.nn.Conv2d`): the leaf that gives the logits.
    """

    path: str
    module: Leaf


def find_heads(model: nn.Module, paths: str | Iterable[str] | None = None) -> list[Head]:
    """Find every classifier leaf of an image classifier.

    Args:
        model (`torch.nn.Module`):
            A timm model, a `TimmWrapperForImageClassification` or a transformers `*ForImageClassification`; peft's,
            DDP's and torch.compile's wrappers of one too.
        paths (`str` or iterable of `str`, *optional*):
            Dotted paths of the leaves, for models of your own. The search is skipped then.

    Returns:
        `list[Head]`: at least one, in the order of the model's modules. Models with distilled, auxiliary or token
        heads have several.

    Raises:
        InputError: no head is found, a path leads to none, or the head's classes are not `config.num_labels`. The
            message lists candidates, or both numbers.

    Example:

    ```python
    >>> import timm
    >>> from entame_hf import find_heads

    >>> [head.path for head in find_heads(timm.create_model("resnet18"))]
    ['fc']
    ```
    """
    if paths is not None:
        paths = [paths] if isinstance(paths, str) else list(paths)
        if not paths:
            raise InputError("`head=[]` names no head. Give the path of one, such as `head=fc`, or None to search.")
        return [_at(model, str(path)) for path in dict.fromkeys(paths)]
    base = base_model(model)
    if isinstance(base, PreTrainedModel) and MODEL_MAPPING_NAMES.get(base.config.model_type) == type(base).__name__:
        # Its inner layers may have one output a label by chance.
        raise InputError(
            f"This {type(base).__name__} is a backbone without a classifier head. Load the checkpoint with "
            "AutoModelForImageClassification.from_pretrained(..., num_labels=10), with your number of classes."
        )
    if isinstance(base, PreTrainedModel) and base.config.model_type != "timm_wrapper":
        found = _transformers_paths(base)
    elif timm_model(base) is not None:
        found = _timm_paths(base)
    else:
        found = []
    if not found:
        raise InputError(_why_none(model, base))
    return [_at(model, path) for path in found]


def _why_none(model: nn.Module, base: nn.Module) -> str:
    """Explain why a search found no head, and what to type."""
    inner = timm_model(base)
    if inner is not None and getattr(inner, "num_classes", None) == 0:
        return (
            f"This {type(inner).__name__} was built without a classifier head (num_classes=0). "
            "Pass num_classes=10 (your number of classes) to timm.create_model."
        )
    if isinstance(base, PreTrainedModel):
        if base.config.num_labels == 0:
            return (
                f"This {type(base).__name__} was built without a classifier head (num_labels=0). "
                "Pass num_labels=10 (your number of classes) to from_pretrained."
            )
        outside = [head for head in leaves(base) if not head[0].startswith(f"{base.base_model_prefix}.")]
        if outside:
            path, leaf = outside[-1]
            return disagreement(path, num_classes(leaf), base.config.num_labels)
    return (
        f"No classifier head found in {type(base).__name__}. "
        f'Pass EntameConfig(head="path"); candidates: {", ".join(_candidates(model)) or "none"}.'
    )


def disagreement(path: str, outputs: int, labels: int | None) -> str:
    """Write the message for a head whose outputs are not the config's labels."""
    return (
        f"`{path}` has {outputs} outputs and `config.num_labels` is {labels}: the loss needs the same number. Type "
        f"model.config.num_labels = {outputs}, or load the model with num_labels={labels} and "
        "ignore_mismatched_sizes=True."
    )


def wrapped_models(model: Any) -> Iterator[Any]:
    """Iterate from a model through peft's, DDP's and torch.compile's wrappers to the model inside."""
    yield model
    while steps := _wrapped_at(model):
        model = model.get_submodule(".".join(steps))
        yield model


def base_model(model: Any) -> Any:
    """Get the model inside peft's, DDP's and torch.compile's wrappers; any other model is returned as it is."""
    *_, base = wrapped_models(model)
    return base


def is_peft(module: nn.Module) -> bool:
    """Check whether a module is peft's: a model with adapters, or an adapted layer."""
    return type(module).__module__.startswith("peft.")


def has_adapters(model: nn.Module) -> bool:
    """Check whether a model holds peft's adapters, added by peft or by `model.add_adapter` of transformers."""
    return any(is_peft(module) for module in model.modules())


def timm_model(model: nn.Module) -> Any:
    """Get the timm model that `model` is or wraps; None for other libraries' models."""
    model = base_model(model)
    if isinstance(model, PreTrainedModel):
        return base_model(model.timm_model) if model.config.model_type == "timm_wrapper" else None
    return model if "pretrained_cfg" in vars(model) else None


def _timm_paths(model: nn.Module) -> list[str]:
    """Read the leaves from timm's own table: `get_classifier()` is a container for 99 of its models."""
    inner = timm_model(model)
    names = inner.pretrained_cfg.get("classifier") or ()
    prefix = "" if inner is model else TIMM_PREFIX
    names = [names] if isinstance(names, str) else list(names)
    names += [TIMM_SECOND_HEADS[name] for name in names if TIMM_SECOND_HEADS.get(name, name) not in names]
    return [f"{prefix}{name}" for name in names if isinstance(_get(inner, name)[1], Leaf)]


def _transformers_paths(model: PreTrainedModel) -> list[str]:
    """List the leaves outside of the backbone that have one output a label."""
    if model.config.model_type in TRANSFORMERS_HEADS:
        return TRANSFORMERS_HEADS[model.config.model_type]
    backbone, labels = f"{model.base_model_prefix}.", model.config.num_labels
    outside = {path: num_classes(leaf) for path, leaf in leaves(model) if not path.startswith(backbone)}
    found = [path for path, outputs in outside.items() if outputs == labels]
    if len(found) < 2:
        return found
    # Not every class keeps its backbone under one name, and a layer of it may be as wide by chance.
    heads = {known: [path for path in found if f"{path}.".startswith(f"{known}.")] for known in _stock_paths(model)}
    for paths in heads.values():
        if len(paths) > 1:
            raise InputError(
                f"{' and '.join(paths)} have one output for each of {labels} classes. Name the one that gives the "
                f'logits: EntameConfig(head="{paths[-1]}").'
            )
    return [path for path in found if [path] in heads.values()] or found


# By class, config and number of labels: the heads of a model are looked for again and again.
_known_paths: dict[tuple[Any, str], list[str]] = {}


def _stock_paths(model: PreTrainedModel) -> list[str]:
    """List the leaves of a transformers model, as its class builds it, whose outputs follow the number of labels."""
    key = type(model), model.config.to_json_string()
    if key not in _known_paths:
        config = copy.deepcopy(model.config)
        config.num_labels = number = (config.num_labels or 0) + 1
        with torch.device("meta"), suppress(Exception):
            # A class of the user's own may be built from more than a config.
            other = type(model)(config)
            _known_paths[key] = [path for path, leaf in leaves(other) if num_classes(leaf) == number]
    return _known_paths.get(key, [])


def num_classes(leaf: Leaf) -> int:
    """Get C, the number of classes that a leaf gives logits for."""
    return leaf.out_features if isinstance(leaf, nn.Linear) else leaf.out_channels


def num_features(leaf: Leaf) -> int:
    """Get K, the number of features that a leaf reads per example or position."""
    return leaf.in_features if isinstance(leaf, nn.Linear) else leaf.in_channels


def leaves(module: nn.Module, path: Sequence[str] = ()) -> Iterator[tuple[str, Leaf]]:
    """Iterate over the leaves that compute, without an adapter's own leaves and its spare copies.

    Yields:
        `tuple[str, torch.nn.Module]`: path and leaf.
    """
    steps, module = _unwrap(list(path), module)
    if isinstance(module, Leaf):
        yield ".".join(steps), module
    for name, child in module.named_children():
        yield from leaves(child, [*steps, name])


def _wrapped_at(module: Any) -> list[str]:
    """Get the path from a wrapper, or a layer of peft's, to what it wraps; empty for other modules."""
    children = module._modules
    if is_peft(module) and "modules_to_save" in children:
        return ["modules_to_save", *module.active_adapters[:1]]
    if is_peft(module) and "base_layer" in children:
        return ["base_layer"]
    if is_peft(module) and "base_model" in children:
        return ["base_model", "model"] if is_peft(module.base_model) else ["base_model"]
    return next(([name] for name in WRAPPED if list(children) == [name]), [])


def _unwrap(path: list[str], module: Any) -> tuple[list[str], nn.Module]:
    """Go through wrappers and peft's layers to the module that they wrap, and extend the path to it."""
    while steps := _wrapped_at(module):
        path, module = path + steps, module.get_submodule(".".join(steps))
    return path, module


def _get(model: nn.Module, path: str) -> tuple[str, nn.Module | None]:
    """Follow a dotted path through wrappers: the path as `get_submodule` takes it, and the module there."""
    steps: list[str] = []
    module = model
    for name in path.split("."):
        if name not in module._modules:
            steps, module = _unwrap(steps, module)
        if name not in module._modules:
            return path, None
        steps, module = [*steps, name], module.get_submodule(name)
    steps, module = _unwrap(steps, module)
    return ".".join(steps), module


def _at(model: nn.Module, path: str) -> Head:
    found, module = _get(model, path)
    if not isinstance(module, Leaf):
        what = "nothing" if module is None else f"a {type(module).__name__}"
        raise InputError(
            f"{path!r} is {what} in {type(model).__name__}: a head is a Linear or a Conv2d. "
            f"Candidates: {', '.join(_candidates(model)) or 'none'}."
        )
    if isinstance(module, nn.Conv2d) and (module.kernel_size != (1, 1) or module.groups != 1):
        raise InputError(f"{path!r} is a {module}: a convolution is a head only where its kernel is 1×1.")
    return Head(found, module)


def _candidates(model: nn.Module, at_most: int = 5) -> list[str]:
    """List the last leaves of a model, where a head usually stands."""
    return [path for path, _ in leaves(base_model(model))][-at_most:][::-1]
