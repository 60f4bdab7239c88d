"""Keras models that npm packages ship for TensorFlow.js, as timm's models."""

from __future__ import annotations

import base64
import json
import re
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from entame_hf import InputError

# Folders of JavaScript files; the suite's file says which package has them.
FOLDER = Path(__file__).parents[2] / "data" / "tfjs"
# A source's folder, and what timm calls the model.
TENSORFLOW_JS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "inception_v3": ("inception_v3", "inception_v3", {}),
    "mobilenetv2": ("mobilenet_v2", "mobilenetv2_100", {"pad_type": "same", "bn_eps": 1e-3}),
}


def tensorflow_js(source: str) -> nn.Module:
    """Load the backbone of a Keras model; the head is timm's own, newly drawn.

    Args:
        source (`str`): A key of `TENSORFLOW_JS`.

    Returns:
        `torch.nn.Module`: A timm model with the weights of the convolutions and BatchNorms, in the order of both.

    Raises:
        InputError: The files are missing.
    """
    folder, name, options = TENSORFLOW_JS[source]
    layers, weights = read_model(FOLDER / folder)
    model = timm.create_model(name, num_classes=2, **options)
    pairs = (
        (nn.Conv2d, [each for each in layers if weights.get(f"{each}/kernel", torch.empty(0)).ndim == 4
                     or f"{each}/depthwise_kernel" in weights]),
        (nn.BatchNorm2d, [each for each in layers if f"{each}/moving_mean" in weights]),
    )  # fmt: skip
    for kind, found in pairs:
        ours = [module for module in model.modules() if isinstance(module, kind)]
        for module, layer in zip(ours, found, strict=True):
            module.load_state_dict(_state(layer, weights), strict=False)
    for module_name, module in model.named_modules():
        # TensorFlow's average at the border leaves the padding out.
        if module_name.endswith(".branch_pool"):
            module.register_forward_pre_hook(_without_padding)
    return model


def read_model(folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    """Read the names of a model's layers, in the order in which they were built, and its weights by name."""
    try:
        text = (folder / "model.min.js").read_text(encoding="utf-8")
        shards = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("group1-shard*.min.js"))]
    except FileNotFoundError as error:
        raise InputError(f"{error.filename} is missing. The suite that names the model says how to get it.") from error
    # A minified object literal, with bare keys, !0 for true and .5 for 0.5.
    text = text[text.index("{modelTopology") if "{modelTopology" in text else text.index('{"modelTopology') :]
    text = re.sub(r"([{,])([A-Za-z_]\w*):", r'\1"\2":', text).replace("!0", "true").replace("!1", "false")
    content, _ = json.JSONDecoder().raw_decode(re.sub(r"([:\[,]-?)\.(\d)", r"\g<1>0.\2", text))
    raw = b"".join(base64.b64decode(max(re.findall(r'"([A-Za-z0-9+/=]+)"', shard), key=len)) for shard in shards)
    weights, at = {}, 0
    for spec in (spec for group in content["weightsManifest"] for spec in group["weights"]):
        quantized = spec.get("quantization")
        kind = np.dtype((quantized or spec)["dtype"])
        values = np.frombuffer(raw, kind, prod(spec["shape"]), at).reshape(spec["shape"])
        at += values.nbytes
        if quantized:
            values = values * np.float32(quantized["scale"]) + np.float32(quantized["min"])
        weights[spec["name"]] = torch.from_numpy(values.astype(np.float32))
    names = [layer["config"]["name"] for layer in content["modelTopology"]["model_config"]["config"]["layers"]]
    # Keras sorts branches by depth, and numbers layers without a name as they are built.
    return sorted(names, key=lambda name: int((re.fullmatch(r"[a-z2d_]+_(\d+)", name) or (0, 0))[1])), weights


def _state(layer: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if f"{layer}/depthwise_kernel" in weights:
        return {"weight": weights[f"{layer}/depthwise_kernel"].permute(2, 3, 0, 1)}
    if f"{layer}/kernel" in weights:
        return {"weight": weights[f"{layer}/kernel"].permute(3, 2, 0, 1)}
    mean = weights[f"{layer}/moving_mean"]
    return {
        "weight": weights.get(f"{layer}/gamma", torch.ones_like(mean)),
        "bias": weights[f"{layer}/beta"],
        "running_mean": mean,
        "running_var": weights[f"{layer}/moving_variance"],
    }


def _without_padding(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Turn averages of 3 × 3 pixels that count the padding as zeros into averages of the image's pixels."""
    (pooled,) = inputs
    return (pooled / avg_pool2d(torch.ones_like(pooled[:1, :1]), 3, 1, 1),)
