"""Limits take images of all classes, and one-hot rows are classes."""

from collections import Counter
from io import BytesIO

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, List, Value
from PIL import Image as PILImage
from transformers import ViTImageProcessor

from entame_hf.data import (
    ClassificationDataset,
    Preparation,
    Splits,
    build_datasets,
    load_splits,
    set_image_size,
    split_dataset,
)
from entame_hf.errors import InputError

SORTED = [label for label, count in enumerate((60, 30, 9, 1)) for _ in range(count)]


def table(labels, feature=None) -> Dataset:
    feature = feature or ClassLabel(num_classes=max(labels) + 1)
    images = [{"bytes": b"%d" % i, "path": None} for i in range(len(labels))]
    return Dataset.from_dict(
        {"image": images, "label": labels}, features=Features({"image": Image(decode=False), "label": feature})
    )


def load(labels, **options) -> Splits:
    return split_dataset({"train": table(labels), "validation": table(labels)}, **options)


@pytest.mark.parametrize("limit", [4, 10, 33, 99])
def test_limits_keep_every_class_in_proportion(limit):
    splits = load(SORTED, max_train_samples=limit, max_eval_samples=limit)
    for part in (splits.train, splits.validation):
        counts = np.bincount(part["label"], minlength=4)
        assert counts.sum() == limit
        assert (counts >= 1).all()
        assert (np.abs(counts - limit * np.array([60, 30, 9, 1]) / 100) <= 3).all()
    assert f"{100 - limit} image" in splits.describe()


@pytest.mark.parametrize("name", ["max_train_samples", "max_eval_samples"])
@pytest.mark.parametrize("limit", [1, 3])
def test_fewer_images_than_classes_are_refused(name, limit):
    with pytest.raises(InputError, match=f"`{name}={limit}` is fewer than the 4 classes.*`{name}=4` or more"):
        load(SORTED, **{name: limit})


@pytest.mark.parametrize("count", [1, 5, 40])
def test_few_images_of_each_class_are_drawn_by_the_seed(count):
    drawn = [load(SORTED, images_per_class=count, seed=seed).train for seed in (0, 0, 1)]
    assert Counter(drawn[0]["label"]) == {i: min(count, n) for i, n in enumerate((60, 30, 9, 1))}
    assert drawn[0]["image"][:] == drawn[1]["image"][:]
    assert drawn[0]["image"][:] != drawn[2]["image"][:]


def test_images_that_are_not_drawn_are_told():
    splits = load(SORTED, images_per_class=5)
    assert "84 images of train left out: not drawn, images_per_class=5." in splits.describe()
    kept = {int(image["bytes"]) for image in splits.train["image"]}
    assert [image for image, *_ in splits.skipped] == [f"row {i}" for i in range(100) if i not in kept]
    assert {(split, reason) for _, split, reason in splits.skipped} == {("train", "not drawn, images_per_class=5")}


def test_images_are_named_by_their_rows_in_the_table_that_they_come_from():
    splits = split_dataset({"train": table(SORTED[:99])}, max_train_samples=40, max_eval_samples=9)
    used = [{int(image["bytes"]) for image in part["image"]} for part in (splits.train, splits.validation)]
    assert {f"row {i}" for i in range(99)} - {image for image, *_ in splits.skipped} == {
        f"row {i}" for i in set.union(*used)
    }
    assert len(splits.skipped) == 99 - 40 - 9


def test_very_many_images_are_left_out_as_a_count(monkeypatch):
    monkeypatch.setattr("entame_hf.data.source.MAX_NAMED", 50)
    splits = load(SORTED, images_per_class=5)
    assert splits.skipped == [("84 images, too many to name", "train", "not drawn, images_per_class=5")]


def test_two_limits_at_once_are_refused():
    with pytest.raises(InputError, match="`images_per_class` or `max_train_samples`, and not both"):
        load(SORTED, images_per_class=5, max_train_samples=5)


@pytest.fixture
def stream(tmp_path):
    """Write sorted splits as Parquet, in row groups as the Hub has them."""

    def make(labels: list[int], rows: int = 100) -> str:
        for split in ("train", "validation"):
            table(labels).to_parquet(tmp_path / "data" / f"{split}.parquet", batch_size=rows)
        return str(tmp_path / "data")

    return make


@pytest.mark.parametrize(
    ("classes", "each", "rows"), [(2, 100, 1000), (10, 60, 100), (10, 400, 100)], ids=["two", "ten", "many_rows"]
)
def test_limited_streams_that_are_sorted_have_many_classes(stream, classes, each, rows):
    name = stream([label for label in range(classes) for _ in range(each)], rows)
    splits = load_splits(dataset_name=name, streaming=True, max_train_samples=50, max_eval_samples=50)
    for part in (splits.train, splits.validation):
        first = list(part)
        assert len({row["image"]["bytes"] for row in first}) == 50
        assert len({row["label"] for row in first}) > classes // 2
        part.set_epoch(3)
        assert [row["image"] for row in part] == [row["image"] for row in first]


def test_a_limit_above_the_size_keeps_the_stream(stream):
    name = stream([0, 1, 2] * 7, 5)
    splits = load_splits(dataset_name=name, streaming=True, max_train_samples=100)
    assert sorted(int(row["image"]["bytes"]) for row in splits.train) == list(range(21))


def test_limited_streams_of_one_class_are_refused(stream):
    name = stream([0] * 3000 + [1] * 3000, 6000)
    with pytest.raises(InputError, match="all images drawn from the stream are of one class, because it is sorted"):
        load_splits(dataset_name=name, streaming=True, max_train_samples=100)


def test_limits_of_streams_below_the_classes_are_refused(stream):
    name = stream([label for label in range(10) for _ in range(10)])
    with pytest.raises(InputError, match="`max_eval_samples=9` is fewer than the 10 classes"):
        load_splits(dataset_name=name, streaming=True, max_eval_samples=9)
    with pytest.raises(InputError, match="Classes of a stream can't be counted"):
        load_splits(dataset_name=name, streaming=True, images_per_class=9)


ONE_HOT = np.eye(3)[[0, 1, 2, 2, 1, 0]]


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float32", "bool"])
@pytest.mark.parametrize("length", [-1, 3], ids=["any", "fixed"])
def test_one_hot_rows_are_classes(dtype, length):
    rows = ONE_HOT.astype(dtype).tolist()
    splits = split_dataset({"train": table(rows, List(Value(dtype), length=length))}, test_fraction=0.5)
    assert splits.class_names == ["0", "1", "2"]
    assert Counter(splits.train["label"]) == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64", "uint16"])
def test_integers_of_any_width_are_classes(dtype):
    splits = split_dataset({"train": table([0, 2, 0, 2], Value(dtype))}, test_fraction=0.5)
    assert splits.class_names == ["0", "2"]
    assert splits.train["label"][:] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 1, 0], [0, 1, 0]], 'row 0 sums to 2.*model.config.problem_type = "multi_label_classification"'),
        ([[1, 0, 0], [0, 0, 0]], "row 1 sums to 0"),
        ([[2, -1, 0], [0, 1, 0]], "row 0 sums to 1"),
        ([[1, 0], [1, 0, 0]], "lists of different lengths"),
    ],
    ids=["several", "none", "negative", "lengths"],
)
def test_rows_of_several_classes_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        split_dataset({"train": table(rows, List(Value("int64")))})


@pytest.mark.parametrize("mixup", [0.0, 0.4])
def test_rows_that_sum_to_one_are_shares(mixup):
    shares = [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5], [0.9, 0.1, 0.0]] * 3
    rows = table(shares, List(Value("float64")))
    buffer = BytesIO()
    PILImage.new("RGB", (40, 40), "red").save(buffer, "PNG")
    rows = rows.map(lambda row: {"image": {"bytes": buffer.getvalue(), "path": None}})
    splits = split_dataset({"train": rows, "validation": rows})
    assert splits.class_names == ["0", "1", "2"]
    assert splits.validation["label"][:4] == [0, 1, 2, 0]
    built = build_datasets(splits, set_image_size(ViTImageProcessor(), 32), mixup_alpha=mixup, image_cache_gb=0)
    labels = built.train.finish(built.train.read(list(range(4))))["labels"]
    assert labels.shape == (4, 3)
    torch.testing.assert_close(labels.sum(1), torch.ones(4))
    if not mixup:
        torch.testing.assert_close(labels, torch.tensor(shares[:4]))
    assert built.train.labels[:4].tolist() == [0, 1, 2, 0]
    assert built.validation.finish(built.validation.read([2]))["labels"].tolist() == [2]


@pytest.mark.parametrize(
    ("labels", "feature", "message"),
    [
        (["a", "b"], Value("string"), "no class indices.*class_encode_column"),
        ([0.0, 1.0], Value("float32"), "no class indices"),
        ([0, None], Value("int32"), "1 of 2 rows have no label"),
        ([[1, 1], [0, 1]], List(Value("uint8")), "row 0 sums to 2"),
    ],
    ids=["text", "floats", "missing", "multi_hot"],
)
def test_labels_that_are_no_classes_are_one_line(labels, feature, message):
    preparation = Preparation(set_image_size(ViTImageProcessor(), 32))
    with pytest.raises(InputError, match=message):
        ClassificationDataset(table(labels, feature), "image", "label", preparation, num_classes=2)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_labels_of_any_integer_type_are_int64(dtype):
    preparation = Preparation(set_image_size(ViTImageProcessor(), 32))
    rows = table([0, 1, 1], Value(dtype))
    assert ClassificationDataset(rows, "image", "label", preparation, num_classes=2).labels.dtype == torch.int64
