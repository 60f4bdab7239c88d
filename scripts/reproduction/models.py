"""Pretrained models by name, with a new head for each run."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import nn

from entame_hf import EntameConfig, apply_entame
from entame_hf.cli.demo import efficientnet_lite
from entame_hf.cli.model import load_classifier
from entame_hf.patch import as_transformers, set_trained

# Name of a source: which EfficientNet-Lite it is. Their weights come from the package index.
EFFICIENTNET_LITES = {f"efficientnet_lite{size}": size for size in range(3)}


def load_model(source: str, num_classes: int) -> nn.Module:
    """Load a pretrained classifier with a new head, drawn from N(0, 0.02²) as transformers does.

    A source is read once in a process; then a copy is made of it, whose head alone takes from torch's random numbers:
    the same seed gives the same head, whatever was loaded before.

    Args:
        source (`str`): an id on the Hub (`timm/resnet50.tv_in1k`), a local folder, or `efficientnet_lite0`,
            `efficientnet_lite1` or `efficientnet_lite2`.
        num_classes (`int`): number of classes.

    Returns:
        `torch.nn.Module`: a transformers classifier (timm's are wrapped), on the CPU, in eval mode.

    Raises:
        InputError: the source cannot be loaded, or its package is not installed.

    Example:

    ```python
    >>> torch.manual_seed(0)
    >>> model = load_model("efficientnet_lite0", num_classes=10)
    ```
    """
    return apply_entame(deepcopy(_pretrained(source)), EntameConfig.for_method("keep"), num_labels=num_classes)


@cache
def _pretrained(source: str) -> Any:
    # Building a model draws weights that are then replaced.
    with torch.random.fork_rng(devices=[]):
        if source in EFFICIENTNET_LITES:
            model = as_transformers(efficientnet_lite(EFFICIENTNET_LITES[source]))
        else:
            model, _ = load_classifier(source, ["0", "1"])
    # So that the head is drawn anew where it has the right number of classes already.
    set_trained(model)
    return model.eval()
