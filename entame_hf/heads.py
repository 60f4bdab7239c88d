"""Where the classifiers of a model are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .errors import InputError

TIMM_PREFIX = "timm_model."

# Second heads that timm's table leaves out, by the first: a distilled one, and one on auxiliary features.
TIMM_SECOND_HEADS = {"head.linear": "head_dist.linear", "fc": "AuxLogits.fc"}

# Where the backbone itself gives the logits.
TRANSFORMERS_HEADS = {"perceiver": ["perceiver.decoder.decoder.final_layer"]}

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
            A timm model, a `TimmWrapperForImageClassification` or a transformers `*ForImageClassification`.
        paths (`str` or iterable of `str`, *optional*):
            Dotted paths of the leaves, for models of your own; nothing is searched then.

    Returns:
        `list[Head]`: at least one, in the order of the model's modules; several where a model has distilled,
        auxiliary or token heads.

    Raises:
        ValueError: no head was found, or a path leads to none; the message lists candidates.

    Example:

    ```python
    >>> import timm
    >>> from entame_hf import find_heads

    >>> [head.path for head in find_heads(timm.create_model("resnet18"))]
    ['fc']
    ```
    """
    if paths is not None:
        return [_at(model, path) for path in ([paths] if isinstance(paths, str) else paths)]
    base = base_model(model)
    if isinstance(base, PreTrainedModel) and base.config.model_type != "timm_wrapper":
        found = _transformers_paths(base)
    elif timm_model(base) is not None:
        found = _timm_paths(base)
    else:
        found = []
    if not found:
        inner = timm_model(base)
        if inner is not None and getattr(inner, "num_classes", None) == 0:
            raise InputError(
                f"This {type(inner).__name__} was built without a classifier head. "
                "Pass num_classes=10 (your number of classes) to timm.create_model."
            )
        raise InputError(
            f"No classifier head found in {type(base).__name__}. "
            f'Pass EntameConfig(head="path"); candidates: {", ".join(_candidates(model)) or "none"}.'
        )
    return [_at(model, path) for path in found]


def base_model(model: Any) -> Any:
    """Get the model that was adapted with peft; every other model is its own."""
    return model.get_base_model() if is_peft(model) else model


def is_peft(module: nn.Module) -> bool:
    """Tell whether a module is one of peft's: a model with adapters, or a layer of it."""
    return type(module).__module__.startswith("peft.")


def timm_model(model: nn.Module) -> Any:
    """Get the timm model that `model` is or wraps; None where it is another library's."""
    model = base_model(model)
    if isinstance(model, PreTrainedModel):
        return model.timm_model if model.config.model_type == "timm_wrapper" else None
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
    """Take the leaves outside of the backbone that are as wide as the labels are many."""
    if model.config.model_type in TRANSFORMERS_HEADS:
        return TRANSFORMERS_HEADS[model.config.model_type]
    backbone = f"{model.base_model_prefix}."
    return [
        path
        for path, leaf in _leaves(model)
        if not path.startswith(backbone) and num_classes(leaf) == model.config.num_labels
    ]


def num_classes(leaf: Leaf) -> int:
    """Count the classes that a leaf tells apart: C."""
    return leaf.out_features if isinstance(leaf, nn.Linear) else leaf.out_channels


def num_features(leaf: Leaf) -> int:
    """Count the features that a leaf reads per example or position: K."""
    return leaf.in_features if isinstance(leaf, nn.Linear) else leaf.in_channels


def _leaves(module: nn.Module, path: Sequence[str] = ()) -> Iterator[tuple[str, Leaf]]:
    """Iterate over the leaves that compute, and not over an adapter's own or those that it has put aside."""
    steps, module = _through_adapter(list(path), module)
    if isinstance(module, Leaf):
        yield ".".join(steps), module
    for name, child in module.named_children():
        yield from _leaves(child, [*steps, name])


def _through_adapter(path: list[str], module: Any) -> tuple[list[str], nn.Module]:
    """Go from a model or layer of peft's to what it adapts, or to the copy of it that it trains."""
    steps: list[str] = []
    if is_peft(module) and "modules_to_save" in module._modules:
        steps = ["modules_to_save", *module.active_adapters[:1]]
    elif is_peft(module) and "base_layer" in module._modules:
        steps = ["base_layer"]
    elif is_peft(module) and "base_model" in module._modules:
        steps = ["base_model", "model"]
    return path + steps, module.get_submodule(".".join(steps))


def _get(model: nn.Module, path: str) -> tuple[str, nn.Module | None]:
    """Follow a dotted path, through adapters that stand in its way: the path as `get_submodule` takes it, and what is
    there."""
    steps: list[str] = []
    module = model
    for name in path.split("."):
        if name not in module._modules:
            steps, module = _through_adapter(steps, module)
        if name not in module._modules:
            return path, None
        steps, module = [*steps, name], module.get_submodule(name)
    steps, module = _through_adapter(steps, module)
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
    """List the last leaves of a model: a head stands at its end."""
    return [path for path, _ in _leaves(base_model(model))][-at_most:][::-1]
