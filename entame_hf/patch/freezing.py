"""A backbone that stands still: linear probing; or its running statistics alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..heads import Head


@contextmanager
def frozen_backbone(model: nn.Module, heads: list[Head]) -> Iterator[None]:
    """Let nothing but the heads learn while this context lasts.

    The backbone becomes a fixed function of the image: its parameters get no gradients, and its modules stay in eval
    mode whatever `model.train()` says, so that running statistics stand still and nothing is dropped at random.
    Dropout beside a head goes on: it regularises the head. Afterwards everything may learn that could before.

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
    still = _without_heads(model, {head.module for head in heads})
    with frozen_backbone_parameters(model, heads), _in_eval_mode(still):
        yield


@contextmanager
def frozen_backbone_parameters(model: nn.Module, heads: list[Head]) -> Iterator[None]:
    """Let no parameter but the heads' learn while this context lasts; running statistics go on."""
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
    """Let batch normalisation keep the running statistics that it came with while this context lasts.

    It normalises by them in training as well, so that a feature is the same function of an image in training and in
    evaluation, from the first step on. All parameters may learn, those of batch normalisation included.

    Args:
        model (`torch.nn.Module`): an image classifier; one without batch normalisation stays as it is.

    Source: the [guide to transfer learning](https://keras.io/guides/transfer_learning/) of Keras, "Fine-tuning", and
    section 4 of [Fine-tuning can distort pretrained features](https://arxiv.org/abs/2202.10054).
    """
    with _in_eval_mode(module for module in model.modules() if isinstance(module, _BatchNorm)):
        yield


@contextmanager
def _in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    # Some may stand still already, by a context around this one or by their owner's means.
    before = {module: vars(module).get("train") for module in modules}
    for module in before:
        module.eval()
        # Whoever trains calls model.train() before every step. A partial survives copies and pickles.
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
