"""fastai's head and schedule, as peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from entame_hf import EntameConfig

from .peers import TwoPhaseTrainer

# fastai trains these in its frozen epoch too.
_NORMALISATIONS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.LayerNorm)


class Body(nn.Module):
    """A timm model up to its last feature map, or to its pooled features where it has no map."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.has_map = model.pretrained_cfg.get("pool_size") is not None

    def forward(self, images: Tensor) -> Tensor:
        if not self.has_map:
            return self.model(images)
        features = self.model.forward_features(images)
        return features.movedim(-1, 1) if getattr(self.model, "output_fmt", "NCHW") == "NHWC" else features


class ConcatPool(nn.Module):
    """Concatenate the maximum and the mean over positions."""

    def forward(self, features: Tensor) -> Tensor:
        return torch.cat([features.amax((2, 3)), features.mean((2, 3))], 1)


def put_head(model: Any, classes: int) -> EntameConfig:
    """Give a wrapped timm model fastai's head; return the configuration that says where its classifier is.

    Both poolings, then twice BatchNorm, dropout and a linear layer without bias, with 512 features between.

    Source: [`fastai/vision/learner.py`](https://github.com/fastai/fastai/blob/main/fastai/vision/learner.py)
    (Apache-2.0).
    """
    body = Body(model.timm_model)
    model.timm_model.reset_classifier(0)
    width = body.model.num_features * (2 if body.has_map else 1)
    layers: list[nn.Module] = [ConcatPool()] if body.has_map else []
    for inputs, outputs, dropout in ((width, 512, 0.25), (512, classes, 0.5)):
        linear = nn.Linear(inputs, outputs, bias=False)
        nn.init.kaiming_normal_(linear.weight)
        layers += [nn.BatchNorm1d(inputs), nn.Dropout(dropout), linear, nn.ReLU(inplace=True)]
    model.timm_model = nn.Sequential(body, nn.Sequential(*layers[:-1]))
    return EntameConfig.for_method("keep", head=f"timm_model.1.{len(layers) - 2}")


class FastaiFineTune(TwoPhaseTrainer):
    """The schedule of fastai's `Learner.fine_tune(epochs - 1, base_lr=learning_rate)`, with its defaults.

    The same as in fastai: first one epoch with a frozen backbone. Its normalisation layers train, at a tenth of the
    head learning rate, and update their running statistics. The head has one cycle (`pct_start` 0.99, `div` 25) up to
    `base_lr`. Then all parameters train with one cycle (0.3, 5) up to `base_lr` / 2 for the head, 1/100 of that for
    the first layers and the geometric mean for those between. Each cycle ends at 1e-5 of its peak and takes Adam's
    first momentum from 0.95 to 0.85 and back. Adam's state is cleared between the two.

    Different from fastai: the frozen epoch is one of `num_train_epochs`, so that no method trains longer. fastai cuts
    torchvision's backbones by hand, a ResNet after its second stage, and timm's not at all; here the cut is after half
    of the parameter tensors, which in a ResNet-50 is within a block of that. The head is the architecture's own unless
    `fastai_head` is set. A suite sets Adam's options.

    Source: [`fastai/callback/schedule.py`](https://github.com/fastai/fastai/blob/main/fastai/callback/schedule.py)
    (Apache-2.0).
    """

    LR_MULT = 100
    DIV_FINAL = 1e5
    PCT_START, DIV = (0.99, 0.3), (25.0, 5.0)

    @property
    def first_epochs(self) -> int:
        return 1

    def head_modules(self) -> list[nn.Module]:
        return [self.model.timm_model[1]] if self.args.fastai_head else [head.module for head in self.heads()]

    # Discriminative learning rates need groups of their own.
    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        optimizer = super().create_optimizer(model)
        learned = [parameter for module in self.head_modules() for parameter in module.parameters()]
        heads = {id(parameter) for parameter in learned}
        backbone = [p for p in self.model.parameters() if id(p) not in heads]
        early, late = backbone[: len(backbone) // 2], backbone[len(backbone) // 2 :]
        own = self.get_decay_parameter_names(self.model)
        decayed = {id(p) for name, p in self.model.named_parameters() if name in own}
        common = optimizer.param_groups[0]
        optimizer.param_groups.clear()
        for decay in (self.args.weight_decay, 0.0)[: 2 if self.args.weight_decay else 1]:
            for parameters in (early, late, learned):
                kept = [p for p in parameters if not self.args.weight_decay or (id(p) in decayed) == (decay > 0)]
                optimizer.add_param_group({**common, "params": kept, "weight_decay": decay})
        return optimizer

    @contextmanager
    def first_phase(self) -> Iterator[None]:
        heads = [each for module in self.head_modules() for each in module.modules()]
        learning = [m for m in self.model.modules() if m in heads or isinstance(m, _NORMALISATIONS)]
        kept = {id(parameter) for module in learning for parameter in module.parameters()}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in kept]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def scheduler(self, phase: int, steps: int) -> LRScheduler:
        peak = self.args.learning_rate
        if phase == 0:
            peaks = [peak / 10, peak / 10, peak]
        else:
            peaks = [peak / 2 / self.LR_MULT, peak / 2 / self.LR_MULT**0.5, peak / 2]
        return OneCycleLR(
            self.optimizer,
            peaks * (len(self.optimizer.param_groups) // 3),
            total_steps=steps + 1,
            pct_start=self.PCT_START[phase],
            div_factor=self.DIV[phase],
            final_div_factor=self.DIV_FINAL / self.DIV[phase],
        )
