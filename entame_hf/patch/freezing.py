"""Freeze the backbone, or only its BatchNorm running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from ..heads import Head, has_adapters

# timm's own are among them.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@contextmanager
def frozen_backbone(model: nn.Module, heads: list[Head]) -> Iterator[None]:
    """Freeze everything but the heads while this context lasts: a linear probe.

    The backbone becomes a fixed function of the image. Its parameters get no gradients. Its modules stay in eval mode
    whatever `model.train()` says, which freezes running statistics and switches off dropout and stochastic depth.
    Dropout next to a head stays on, as it regularises the head.

    Args:
        model (`torch.nn.Module`): an image classifier.
        heads (`list[Head]`): what [`find_heads`] finds in it.

    Example:

    ```python
    >>> import timm
    >>> from entame_hf import find_heads
    >>> from entame_hf.patch import frozen_backbone

    >>> model = timm.create_model("resnet18")
    >>> with frozen_backbone(model, find_heads(model)):
    ...     print([name for name, parameter in model.named_parameters() if parameter.requires_grad])
    ['fc.weight', 'fc.bias']
    ```
    """
    backbone = _without_heads(model, {head.module for head in heads})
    with frozen_backbone_parameters(model, heads), _in_eval_mode(backbone):
        yield


@contextmanager
def frozen_backbone_parameters(model: nn.Module, heads: list[Head]) -> Iterator[None]:
    """Freeze all parameters but the heads' while this context lasts; running statistics still move."""
    learning = {id(parameter) for head in heads for parameter in head.module.parameters()}
    frozen = [p for p in model.parameters() if p.requires_grad and id(p) not in learning]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Freeze BatchNorm's running statistics while this context lasts.

    BatchNorm normalises by them in training too, so a feature is the same function of an image in training and in
    evaluation. All parameters train, BatchNorm's included.

    Args:
        model (`torch.nn.Module`): an image classifier; one without batch normalisation stays as it is.

    Source: the [guide to transfer learning](https://keras.io/guides/transfer_learning/) of Keras, "Fine-tuning", and
    section 4 of [Fine-tuning can distort pretrained features](https://arxiv.org/abs/2202.10054).
    """
    with _in_eval_mode(module for module in model.modules() if isinstance(module, BATCH_NORMS)):
        yield


def unsaved_batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Find the BatchNorm layers, by path, whose running statistics an adapter's checkpoint does not hold."""
    if not has_adapters(model):
        return {}
    found = ((path, module) for path, module in model.named_modules() if isinstance(module, BATCH_NORMS))
    # peft saves the copies in one of them, and leaves those in the other unused.
    return {
        path: module for path, module in found if {"modules_to_save", "original_module"}.isdisjoint(path.split("."))
    }


@contextmanager
def _in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    # An outer context, or the model's owner, may have frozen some already.
    before = {module: vars(module).get("train") for module in modules}
    for module in before:
        module.eval()
        # Trainer calls model.train() before every step. A partial survives copies and pickles.
        vars(module)["train"] = partial(_stay, module)
    try:
        yield
    finally:
        for module, train in before.items():
            del vars(module)["train"]
            if train is not None:
                vars(module)["train"] = train


def _without_heads(module: nn.Module, heads: set[nn.Module]) -> Iterator[nn.Module]:
    """Iterate over the largest parts of a model that hold no head."""
    for child in module.children():
        if child in heads or isinstance(child, nn.Dropout):
            continue
        if heads.isdisjoint(child.modules()):
            yield child
        else:
            yield from _without_heads(child, heads)


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
