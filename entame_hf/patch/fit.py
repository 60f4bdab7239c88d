"""Fit a model's heads to its features before training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..errors import InputError
from ..heads import Head, find_heads, num_classes
from ..layers import ZNormLeaf
from .features import HeadFeatures, collect_features, per_process, sum_over_ranks
from .gathering import is_sharded
from .ridge import Ridge, fit_ridge
from .state import applied_config, has_trained_head, stop_check

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class HeadFit:
    """Describe a head that was fitted to features.

    Args:
        path (`str`): the head's.
        samples (`int`): images that it was fitted to, in all processes.
        accuracy (`float`): its leave-one-out accuracy, which is what to expect on unseen images before any training.
        alpha (`float`): the penalty α with which leaving one image out errs least.
    """

    path: str
    samples: int
    accuracy: float
    alpha: float


def fit_head(
    model: nn.Module, batches: Iterable[Any], *, class_weights: Tensor | None = None, max_samples: int = 50_000
) -> list[HeadFit]:
    """Point each head at the right classes by ridge regression, near maximum entropy.

    Logits start as the regression's estimates of the classes' probabilities, less their means. The own class's is
    above the others' by at most 1, and by next to nothing where features say nothing of unseen images. One pass in
    eval mode reads the features; the weights have a closed form, with nothing to tune. Feature statistics start as
    those of the images. In several processes, each gives its own batches, and all get the same heads.

    Args:
        model (`torch.nn.Module`): prepared with `apply_entame(model, EntameConfig.for_method("informed"))`.
        batches (iterable):
            Training images as evaluation sees them, such as a `DataLoader`: mappings of the model's inputs and
            `labels`, or pairs of images and labels. Labels are of shape `(N,)`, -100 where an image is to be ignored,
            or rows of probabilities, whose largest counts.
        class_weights (`torch.Tensor` of shape `(C,)`, *optional*): how much each class counts, as in the loss.
        max_samples (`int`, *optional*, defaults to 50,000):
            Images to fit to, over all processes; no batch is read after them. Their features stay in memory meanwhile.

    Returns:
        `list[HeadFit]`: one for each head.

    Raises:
        InputError: the model was not prepared or is sharded, its heads differ in their number of classes, there is no
            labelled image, or a label is none of the head's classes.

    Example:

    ```python
    >>> import timm, torch
    >>> from entame_hf import EntameConfig, apply_entame, fit_head

    >>> model = timm.create_model("test_resnet", num_classes=2)
    >>> _ = apply_entame(model, EntameConfig.for_method("informed"))
    >>> fit_head(model, [(torch.randn(8, 3, 64, 64), torch.arange(8) % 2)])[0].samples
    8
    ```
    """
    config = applied_config(model)
    if config is None or config.init != "ridge":
        raise InputError(
            f"fit_head got a model whose heads have {'no' if config is None else f'init={config.init!r} in their'} "
            'configuration; it fits those with init="ridge". Call '
            'apply_entame(model, EntameConfig.for_method("informed")) first.'
        )
    if has_trained_head(model):
        raise InputError(
            "This model was adapted with ENTAME before, and fit_head would wipe what its head has learned. Fit it "
            "before its training, or call apply_entame(model, config, num_labels=...) to start a new head."
        )
    heads = find_heads(model, config.head)
    features = collect_head_features(model, heads, batches, per_process(max_samples))
    return fit_to_features(heads, features, config.eps, class_weights)


def collect_head_features(
    model: nn.Module, heads: list[Head], batches: Iterable[Any], max_samples: int
) -> list[HeadFeatures]:
    """Collect what heads read, see [`collect_features`], of a model that is not sharded."""
    counts = {num_classes(head.module): head.path for head in heads}
    if len(counts) > 1:
        (first, path), (second, other), *_ = counts.items()
        raise InputError(
            f"{path} has {first} classes and {other} has {second}: the labels of one task cannot fit both. Name heads "
            'of one task: EntameConfig.for_method("informed", head=...); or use `entame_method="entame"`.'
        )
    for head in heads:
        if is_sharded(head.module):
            raise InputError(
                f"{head.path} is sharded already, and fitting it needs all of the model: call fit_head first, then "
                "shard the model."
            )
    return collect_features(model, heads, batches, max_samples, num_classes(heads[0].module))


def fit_to_features(
    heads: list[Head], features: list[HeadFeatures], eps: float = 1e-5, class_weights: Tensor | None = None
) -> list[HeadFit]:
    """Fit heads to what they read: see [`fit_head`].

    Args:
        heads (`list[Head]`): their weights, biases and feature statistics are set.
        features (`list[HeadFeatures]`): this process's, one for each head.
        eps (`float`, *optional*, defaults to 1e-5): added to the variance under the root.
        class_weights (`torch.Tensor` of shape `(C,)`, *optional*): how much each class counts.

    Returns:
        `list[HeadFit]`: one for each head that evaluation uses.
    """
    counts = [int(sum_over_ranks(read.count.clone())) for read in features]
    if not any(counts):
        raise InputError("There is no labelled image to fit the head to: give batches of images and labels.")
    fits = []
    for head, read, count in zip(heads, features, counts, strict=True):
        if not count:
            logger.warning(f"{head.path} is not used in evaluation: it starts at maximum entropy, and is not fitted.")
            continue
        mean, var = read.statistics()
        std = torch.sqrt(var + eps)
        leaf = head.module
        ridge = fit_ridge(
            read,
            num_classes(leaf),
            mean,
            std,
            class_weights=class_weights,
            blind=leaf.bias is None and not isinstance(leaf, ZNormLeaf),
        )
        _write(leaf, ridge, mean, var, std)
        stop_check(leaf)
        fits.append(HeadFit(head.path, ridge.samples, ridge.accuracy, ridge.alpha))
    return fits


@torch.no_grad()
def _write(leaf: Any, ridge: Ridge, mean: Tensor, var: Tensor, std: Tensor) -> None:
    """Write a map of standardised features into a classifier of these, or of raw ones."""
    weight, centre = ridge.weight, ridge.centre
    if isinstance(leaf, ZNormLeaf):
        leaf.znorm.mean.copy_(mean)
        leaf.znorm.var.copy_(var)
        # They are no arbitrary start: an average over batches moves away from them slowly.
        leaf.znorm.total_weight.fill_(1)
    else:
        weight, centre = weight / std, mean + std * centre
    leaf.weight.copy_(weight.view(leaf.weight.shape))
    if leaf.bias is not None:
        leaf.bias.copy_(-(weight @ centre))
