"""Compare what each method does to a model at its first step, without training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..config import EntameConfig, Method
from ..errors import InputError
from ..heads import Head, find_heads, num_classes
from ..layers import ZNorm
from ..patch import apply_entame, clear_entame_state, has_trained_head, inputs_and_labels
from .error import ErrorEnergy, fraction_of_error
from .first_step import backbone_features, first_step, label_rows, unchanged

METHODS: tuple[Method, ...] = ("base", "keep", "mei", "fn", "entame")

COLUMNS = ("  loss", "entropy", "noise share", "error at features", "passed on", "update noise")

# A loss up to this fraction of ln C shows that the head was trained on these classes.
KNOWS = 0.5

# An entropy from this fraction of ln C on is at its maximum.
UNINFORMED = 0.99

# A head whose error at the features is up to so many times a maximum-entropy head's is at maximum entropy.
ALREADY = 10


@dataclass(frozen=True)
class HeadStart:
    """The error of a head's first training step, per example and averaged.

    Args:
        loss (`float`): cross-entropy, in nats.
        entropy (`float`): entropy of the estimates, in nats; at most ln C.
        noise_share (`float`): E‖ŷ‖² / E‖ŷ − y‖², see [`ErrorEnergy`].
        features (`float`): E‖δ^{L−1}‖², the error's energy at the features, as the trainer logs it.
        features_share (`float`): E‖δ^{L−1}‖² / E‖ŷ − y‖²; above 1 where the head amplifies the error.
        first_update_noise (`float`):
            Noise over error in the backbone's first update. The error ŷ − y reaches the features as
            B(ŷ − y) = B(ŷ) − B(y), estimates (noise) minus labels (signal). This is E‖B(ŷ)‖² / E‖B(ŷ − y)‖², the noise
            share behind the head. Feature normalisation removes what all examples have in common.
    """

    loss: float
    entropy: float
    noise_share: float
    features: float
    features_share: float
    first_update_noise: float


@dataclass(frozen=True)
class HeadReport:
    """Hold the result of [`inspect_head`]; `str(report)` is a table and the advice.

    Args:
        methods (`dict[str, HeadStart]`): the first step of `"base"`, `"keep"`, `"mei"`, `"fn"` and `"entame"`.
        advice (`str`): one sentence.
        classes (`int`): C.
        examples (`int`): number of images that were read.
        heads (`list[str]`): paths of the heads.
        mean_of_heads (`bool`):
            Whether the logits are the mean of the heads' outputs, over heads and positions. Where a model does more
            with them, the values belong to that mean.
    """

    methods: dict[str, HeadStart]
    advice: str
    classes: int
    examples: int
    heads: list[str]
    mean_of_heads: bool

    def __str__(self) -> str:
        title = f"{', '.join(self.heads)}: {self.classes:,} classes, ln C = {math.log(self.classes):.3f}"
        lines = [f"{title}; first step on {self.examples:,} images", "  ".join(("method", *COLUMNS))]
        for method, start in self.methods.items():
            cells = (
                f"{start.loss:.3f}",
                f"{start.entropy:.3f}",
                f"{start.noise_share:.1%}",
                f"{start.features:.2e}",
                f"{start.features_share:.2e}",
                f"{start.first_update_noise:.1%}",
            )
            row = (f"{cell:>{len(name)}}" for cell, name in zip(cells, COLUMNS, strict=True))
            lines.append("  ".join((f"{method:6}", *row)))
        if not self.mean_of_heads:
            lines.append("(Of the heads' mean output: this model does more with it before the loss.)")
        return "\n".join([*lines, self.advice])


def inspect_head(
    model: nn.Module,
    batches: Iterable[Any],
    config: EntameConfig | None = None,
    *,
    learning_rate: float = 1e-4,
    seed: int = 42,
    num_batches: int = 4,
) -> HeadReport:
    """Measure the error of the first training step under each method, without training.

    The backbone reads each batch once, in training mode; then each head is tried on its features. Afterwards the model
    is bit for bit what it was, with its running statistics, modes and random generators.

    The advice is the first of these that fits:

    - Keep the head: its loss is at most half of ln C, or below ln C if the model was adapted with ENTAME.
    - Lower φ_w: a new head's entropy would be below 99 % of ln C.
    - Train the head as it is: the error energy that it sends into the features is at most ten times a maximum-entropy
      head's.
    - Start the head at maximum entropy.

    Args:
        model (`torch.nn.Module`): see [`find_heads`]; on any device, in any floating-point type.
        batches (iterable):
            Training batches, such as a `DataLoader`: mappings of the model's inputs and `labels`, or pairs of images
            and labels. Labels are of shape `(N,)`, or `(N, C)` with a row of probabilities each.
        config ([`EntameConfig`], *optional*):
            φ_w or λ, ε and the heads' paths are read. `feature_norm=False` leaves out `"fn"` and `"entame"`.
        learning_rate (`float`, *optional*, defaults to 1e-4): γ; needed with `noise_lambda` only.
        seed (`int`, *optional*, defaults to 42): new heads are drawn as `EntameTrainer` draws them with this seed.
        num_batches (`int`, *optional*, defaults to 4): number of `batches` that are read.

    Returns:
        [`HeadReport`]

    Raises:
        InputError: no head, no batch, a batch of another form, or a label that is none of the head's classes.

    Example:

    ```python
    >>> import timm, torch
    >>> from entame_hf import inspect_head

    >>> model = timm.create_model("resnet18", num_classes=10)
    >>> batch = torch.randn(8, 3, 64, 64), torch.arange(8)
    >>> round(inspect_head(model, [batch]).methods["mei"].noise_share, 3)  # 1 / (10 - 1)
    0.111
    ```

    Source: sections 4 and 5 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """
    config = config or EntameConfig()
    heads = find_heads(model, config.head)
    device = heads[0].module.weight.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), unchanged(model, heads):
        methods = [name for name in METHODS if config.feature_norm or not EntameConfig.for_method(name).feature_norm]
        tried = {method: _heads_of(method, heads, config, learning_rate, seed) for method in methods}
        sums: dict[str, Any] = dict.fromkeys(methods, 0)
        examples, mean_of_heads = 0, True
        for batch in islice(batches, num_batches):
            images, labels = inputs_and_labels(batch)
            targets, counted = label_rows(labels.to(device), num_classes(heads[0].module))
            if not counted.any():
                continue
            features, alone = backbone_features(model, heads, images)
            mean_of_heads = mean_of_heads and alone
            for method, leaves in tried.items():
                sums[method] += first_step(leaves, features, targets, counted)
            examples += int(counted.sum())
    if not examples:
        raise InputError("There is no labelled image to inspect: give batches of images and labels.")
    starts = {method: _start(total / examples) for method, total in sums.items()}
    return HeadReport(
        methods=starts,
        advice=_advice(model, heads, starts),
        classes=num_classes(heads[0].module),
        examples=examples,
        heads=[head.path for head in heads],
        mean_of_heads=mean_of_heads,
    )


def _heads_of(
    method: Method, heads: list[Head], config: EntameConfig, learning_rate: float, seed: int
) -> nn.ModuleList:
    """Copy the heads in float32, and apply a method to the copies."""
    leaves = nn.ModuleList(copy.deepcopy(head.module).float() for head in heads)
    if method != "keep":
        wanted = EntameConfig.for_method(method)
        paths = [str(index) for index in range(len(leaves))]
        # These are copies.
        clear_entame_state(leaves)
        wanted = replace(config, init=wanted.init, feature_norm=wanted.feature_norm, head=paths)
        apply_entame(leaves, wanted, learning_rate=learning_rate, generator=torch.Generator().manual_seed(seed))
    for module in leaves.modules():
        if isinstance(module, ZNorm):
            # Other processes may read other images, or none.
            module.sync = False
    return leaves.train()


def _start(means: Tensor) -> HeadStart:
    loss, *energies, features, noise = means
    energy = ErrorEnergy(*energies)
    values = (
        loss,
        energy.entropy,
        fraction_of_error(energy.estimates, energy.total),
        features,
        fraction_of_error(features, energy.total),
        fraction_of_error(noise, features),
    )
    return HeadStart(*(float(value) for value in values))


def _advice(model: nn.Module, heads: list[Head], starts: dict[str, HeadStart]) -> str:
    keep, chance = starts["keep"], math.log(num_classes(heads[0].module))
    if keep.loss <= chance * (1 if has_trained_head(model) else KNOWS):
        return (
            f'Keep this head (entame_method="keep"): its loss of {keep.loss:.2f}, where a guess has {chance:.2f}, '
            "shows that it knows these classes, and a new head does not; noise shares mean little for such a head."
        )
    method = "entame" if "entame" in starts and all(head.module.bias is not None for head in heads) else "mei"
    if starts[method].entropy < UNINFORMED * chance:
        return (
            "Lower phi_w or noise_lambda: a new head would not be at maximum entropy "
            f"(entropy {starts[method].entropy:.2f} of {chance:.2f})."
        )
    if keep.features <= ALREADY * max(starts["mei"].features, starts[method].features):
        return "Train as it is: this head is at maximum entropy, and its first error stops there."
    # One digit: it is an order of magnitude.
    ratio = float(f"{keep.features / starts[method].features:.1g}")
    times = f"{ratio:,.0f} times" if ratio < 1e6 else "over a million times"
    return (
        f'Start the head at maximum entropy (entame_method="{method}"): as it is, {times} as much of the '
        f"first error's energy would reach the pretrained features, {keep.first_update_noise:.0%} of it noise."
    )
