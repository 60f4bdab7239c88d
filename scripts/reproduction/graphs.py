"""Replay a backbone as a CUDA graph, where launching its kernels takes longer than running them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from entame_hf.heads import timm_model


class _Features(nn.Module):
    model: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Any:
        return self.model.forward_features(pixels)


def replay_features(model: nn.Module, batch: torch.Size, bf16: bool) -> None:
    """Let a model in training compute features and their gradients by replaying what it does now, in two launches.

    Batches of other sizes, and models in eval mode, go the usual way. What learns, and which mode each layer is in,
    must stay as they are.

    Args:
        model (`torch.nn.Module`): one of timm's, wrapped or not, on a GPU and in training mode; others stay as they
            are.
        batch (`torch.Size`): of the pixels.
        bf16 (`bool`): whether they are computed under autocast.

    Source: [`torch.cuda.make_graphed_callables`](https://docs.pytorch.org/docs/stable/generated/torch.cuda.make_graphed_callables.html).
    """
    inner = timm_model(model)
    if inner is None:
        return
    buffers = {name: buffer.clone() for name, buffer in inner.named_buffers()}
    pixels = torch.randn(batch, device=next(inner.parameters()).device)
    # What autocast caches would not be computed again by the graph.
    precision: Any = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if bf16 else nullcontext()
    with precision:
        replay = torch.cuda.make_graphed_callables(_Features(inner), (pixels,), allow_unused_input=True)
    with torch.no_grad():
        # Trials have moved running statistics.
        for name, buffer in inner.named_buffers():
            buffer.copy_(buffers[name])
    usual = inner.forward_features
    inner.forward_features = lambda x: replay(x) if inner.training and x.shape == batch else usual(x)
