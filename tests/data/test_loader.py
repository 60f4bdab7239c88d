"""Datasets become splits to train, validate and test on, with one image and one label column."""

import re
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Sequence, Value

from entame_hf.data import SkippedImage, load_splits, split_dataset
from entame_hf.errors import InputError

LABELS = ClassLabel(names=["cat", "dog", "owl"])


def table(labels, feature=LABELS, column: str = "label", **more) -> Dataset:
    """Make rows whose images are junk: loading must not decode them."""
    size = len(labels)
    columns = {"image": [{"bytes": b"junk %d" % i, "path": None} for i in range(size)], column: labels}
    features = {"image": Image(), column: feature}
    for name, (values, kind) in more.items():
        columns[name], features[name] = values, kind
    return Dataset.from_dict(columns, features=Features(features))


def load(splits: dict[str, Dataset] | Dataset, **kwargs):
    return split_dataset(DatasetDict(splits) if isinstance(splits, dict) else splits, **kwargs)


def ids(dataset: Dataset) -> set[bytes]:
    return {row["image"]["bytes"] for row in dataset}


def test_a_local_parquet_folder_loads(tmp_path: Path):
    folder = tmp_path / "parquet"
    folder.mkdir()
    table([0, 1, 2, 1]).to_parquet(folder / "train-00000-of-00001.parquet")
    table([1]).to_parquet(folder / "validation-00000-of-00001.parquet")
    table([1, 2]).to_parquet(folder / "test-00000-of-00001.parquet")
    splits = load_splits(dataset_name=str(folder))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (4, 1, 2)
    assert splits.class_names == ["cat", "dog", "owl"]
    assert splits.train.features == Features({"image": Image(decode=False), "label": LABELS})
    assert splits.train[3] == {"image": {"bytes": b"junk 3", "path": None}, "label": 1}


def test_a_folder_of_images_loads(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(10):
            (tmp_path / name / f"{i}.jpg").touch()
    splits = load_splits(data_dir=str(tmp_path), test_fraction=0.3)
    assert Counter(splits.validation["label"]) == {0: 3, 1: 3}
    assert (splits.image_column, splits.label_column, splits.class_names) == ("image", "label", ["a", "b"])


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        ("train validation test", {}, ("train", "validation", "test")),
        ("train test", {"eval_split": "test"}, ("train", "test", None)),
        ("train extra", {"eval_split": "extra"}, ("train", "extra", None)),
        ("fold1 fold2", {"train_split": "fold1", "eval_split": "fold2"}, ("fold1", "fold2", None)),
        ("val extra", {"train_split": "extra"}, ("extra", "val", None)),
        ("train val", {}, ("train", "val", None)),
        ("train valid test", {}, ("train", "valid", "test")),
        ("train dev testing", {}, ("train", "dev", "testing")),
        ("train eval", {}, ("train", "eval", None)),
        ("train Validation", {}, ("train", "Validation", None)),
        ("train validation_matched", {}, ("train", "validation_matched", None)),
        ("training development tst", {}, ("training", "development", "tst")),
        ("train_set val_set test_set", {}, ("train_set", "val_set", "test_set")),
        ("train validation validation_hard", {}, ("train", "validation", None)),
        ("train unlabeled val", {}, ("train", "val", None)),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_splits_are_chosen(names, options, expected):
    # The number of rows tells which split it was.
    sizes = {name: 3 * (i + 1) for i, name in enumerate(names.split())}
    splits = load({name: table([0, 1, 2] * (size // 3)) for name, size in sizes.items()}, **options)
    assert len(splits.train) == sizes[expected[0]]
    assert len(splits.validation) == sizes[expected[1]]
    assert (splits.test and len(splits.test)) == (expected[2] and sizes[expected[2]])


@pytest.mark.parametrize("options", [{}, {"eval_split": "train"}], ids=["no_other_split", "train_named_twice"])
def test_a_share_of_each_class_is_held_out(options):
    data = {"train": table([0] * 100 + [1] * 20 + [2] * 40)}
    if options:
        data["validation"] = table([0, 1, 2])
    splits = load(data, **options)
    assert Counter(splits.validation["label"]) == {0: 15, 1: 3, 2: 6}
    assert Counter(splits.train["label"]) == {0: 85, 1: 17, 2: 34}
    assert not ids(splits.train) & ids(splits.validation)
    assert ids(splits.train) | ids(splits.validation) == {b"junk %d" % i for i in range(160)}


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_every_class_of_two_or_more_is_in_both_parts(fraction):
    splits = load(table([0, 0, 1, 2, 2, 2]), test_fraction=fraction)
    assert set(splits.train["label"]) == {0, 1, 2}
    assert set(splits.validation["label"]) == {0, 2}


def test_the_seed_decides():
    data = table([0, 1] * 100)
    draws = {
        seed: [load(data, seed=s, max_train_samples=50, max_eval_samples=10) for s in (seed, seed)] for seed in (1, 2)
    }
    for first, second in draws.values():
        assert ids(first.train) == ids(second.train)
        assert ids(first.validation) == ids(second.validation)
        assert (len(first.train), len(first.validation)) == (50, 10)
    assert ids(draws[1][0].validation) != ids(draws[2][0].validation)
    assert ids(draws[1][0].train) != ids(draws[2][0].train)


def test_images_are_drawn_from_everywhere():
    splits = load(table([0] * 50 + [1] * 50), max_train_samples=20, max_eval_samples=8)
    assert set(splits.train["label"]) == set(splits.validation["label"]) == {0, 1}


def test_limits_above_the_size_keep_everything():
    splits = load({"train": table([0, 1, 2]), "validation": table([0, 1])}, max_train_samples=9, max_eval_samples=9)
    assert (len(splits.train), len(splits.validation)) == (3, 2)


@pytest.mark.parametrize(
    ("labels", "dtype", "names"),
    [
        (["b", "10", "2", "b"], "string", ["10", "2", "b"]),
        ([10, 2, -3, 10], "int64", ["-3", "2", "10"]),
        ([7, 0, 7, 0], "uint8", ["0", "7"]),
        ([True, False, True, True], "bool", ["False", "True"]),
    ],
    ids=["strings", "integers", "bytes", "booleans"],
)
def test_labels_without_names_are_encoded(labels, dtype, names):
    splits = load(
        {"train": table(labels, Value(dtype), "labels"), "validation": table(labels[:2], Value(dtype), "labels")}
    )
    assert splits.class_names == names
    assert [names[i] for i in splits.train["labels"]] == [str(label) for label in labels]
    assert [names[i] for i in splits.validation["labels"]] == [str(label) for label in labels[:2]]
    assert splits.train.features["labels"] == ClassLabel(names=names)


B_A, STRINGS = ClassLabel(names=["b", "a"]), Value("string")


@pytest.mark.parametrize(
    ("train", "test", "names"),
    [
        (table([0, 1], ClassLabel(names=["a", "b"])), table([0, 1, 0], B_A), ["a", "b"]),
        (table([0, 1, 2], ClassLabel(names=["c", "a", "b"])), table([0, 1, 0], B_A), ["c", "a", "b"]),
        (table([0, 1], ClassLabel(names=["a", "b"])), table([1, 2, 1], ClassLabel(names=["c", "b", "a"])), ["a", "b"]),
        (table(["a", "b"], STRINGS), table([0, 1, 0], B_A), ["a", "b"]),
        (table([0, 1], B_A), table(["b", "a", "b"], STRINGS), ["b", "a"]),
        (table([1, 20], Value("int64")), table([20, 1, 20], Value("int32")), ["1", "20"]),
    ],
    ids=["other_order", "fewer", "more_but_unused", "string_and_label", "label_and_string", "integers"],
)
def test_parts_are_matched_by_the_names_of_classes(train, test, names):
    splits = load({"train": train, "validation": test})
    assert splits.class_names == names
    assert splits.train.features == splits.validation.features
    told = [names[i] for i in splits.validation["label"]]
    assert told == (["20", "1", "20"] if names[0] == "1" else ["b", "a", "b"])
    assert ids(splits.validation) == {b"junk 0", b"junk 1", b"junk 2"}


def test_parts_of_the_same_classes_are_left_as_they_are():
    data = {"train": table([0, 1, 2]), "validation": table([2, 1])}
    splits = load(data)
    undecoded = data["validation"].select_columns(["image", "label"]).cast_column("image", Image(decode=False))
    assert splits.validation._fingerprint == undecoded._fingerprint


def test_names_of_absent_classes_are_kept():
    assert load(table([0, 0, 2, 2])).class_names == ["cat", "dog", "owl"]


FINE = {"fine_label": ([0, 1, 0, 1], ClassLabel(names=["x", "y"]))}


def test_named_columns_are_taken():
    data = table([0, 1, 2, 0], thumb=([b"1", b"2", b"3", b"4"], Value("binary")), **FINE)
    splits = load(data, image_column_name="thumb", label_column_name="fine_label")
    assert splits.class_names == ["x", "y"]
    assert splits.train.features["thumb"] == Image(decode=False)
    assert splits.train[0]["thumb"] == {"bytes": b"1", "path": None}
    assert splits.train.column_names == ["thumb", "fine_label"]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("/a.jpg", Value("string"), {"bytes": None, "path": "/a.jpg"}),
        (
            {"bytes": b"x", "path": "a"},
            {"bytes": Value("binary"), "path": Value("string")},
            {"bytes": b"x", "path": "a"},
        ),
    ],
    ids=["paths", "bytes_and_path"],
)
def test_other_columns_hold_images_where_they_are_named(value, kind, expected):
    data = table([0, 1] * 2, file=([value] * 4, kind))
    assert load(data, image_column_name="file").train[0]["file"] == expected


TWO_IMAGES = {"other": ([{"bytes": b"", "path": None}] * 4, Image())}
MULTI = {"tags": ([[0], [1], [0], [1]], Sequence(ClassLabel(names=["x", "y"])))}
FOUR = [0, 1, 2, 0]
ERRORS = {
    "two_label_columns": (table(FOUR, **FINE), {}, "label, fine_label.*`label_column_name=label`"),
    "two_image_columns": (table(FOUR, **TWO_IMAGES), {}, "image, other.*`image_column_name=image`"),
    "no_label_column": (
        table(FOUR, Value("int64"), "kind"),
        {},
        "No label column.*`label_column_name.*kind",
    ),
    "no_image_column": (table(FOUR).remove_columns("image"), {}, "No image column.*`image_column_name"),
    "label_and_labels": (
        table(FOUR, Value("int64")).add_column("labels", FOUR),
        {},
        "label, labels.*`label_column_name",
    ),
    "named_label_absent": (table(FOUR), {"label_column_name": "y"}, "`label_column_name=y`: no such.*image"),
    "named_image_absent": (table(FOUR), {"image_column_name": "x"}, "`image_column_name=x`: no such.*label"),
    "image_is_no_image": (table(FOUR), {"image_column_name": "label"}, "`image_column_name=label` holds"),
    "label_is_a_list": (table(FOUR, **MULTI), {"label_column_name": "tags"}, "'tags' holds .*allowed: ClassLabel"),
    "label_is_a_float": (table([0.5] * 4, Value("float32")), {}, "'label' holds .*float32"),
    "same_column": (
        table(FOUR, file=(["a", "b"] * 2, Value("string"))),
        {"image_column_name": "file", "label_column_name": "file"},
        "cannot hold both",
    ),
    "unlabelled_rows": (table([0, -1, 1, -1, -1]), {}, "3 of 5 images of split 'train' have no label"),
    "none_label": (table([0, None, 1]), {}, "1 of 3 images of split 'train' have no label"),
    "none_string": (table(["a", None, "b"], Value("string")), {}, "1 of 3 images of split 'train'"),
    "unlabelled_test": (
        {"train": table(FOUR), "validation": table([-1] * 7)},
        {"eval_split": "validation"},
        "7 of 7 images of split 'validation' have no label.*`eval_split",
    ),
    "unknown_class": ({"train": table([0, 1]), "validation": table([0, 2])}, {}, "1 of the classes.*'owl'"),
    "unknown_string": (
        {"train": table(["a", "b"], Value("string")), "validation": table(["a", "zz"], Value("string"))},
        {},
        "'zz'",
    ),
    "more_classes": (
        {"train": table([0, 1], ClassLabel(names=["a", "b"])), "validation": table([0, 1, 2])},
        {},
        "3 of the classes of split 'validation' are not among those of 'train': 'cat', 'dog', 'owl'. 'train' has 'a'",
    ),
    "unlabelled_test_of_other_names": (
        {"train": table(["a", "b"], Value("string")), "validation": table([-1, 0], ClassLabel(names=["a"]))},
        {},
        "1 of 2 images of split 'validation' have no label",
    ),
    "no_label_in_test": (
        {"train": table([0, 1]), "validation": table([0, 1], column="kind")},
        {"eval_split": "validation"},
        "`label_column_name=label`: no such column. Columns: image, kind",
    ),
    "one_class": (table([1, 1, 1]), {}, "one class only to train on, 'dog'"),
    "single_images": (table([0, 1, 2]), {}, "single image"),
    "empty_split": ({"train": table([0, 1]), "validation": table([])}, {}, "'validation' is empty"),
    "no_such_train_split": (table(FOUR), {"train_split": "t"}, "`train_split=t`: no such split.*train"),
    "no_such_eval_split": (table(FOUR), {"eval_split": "t"}, "`eval_split=t`: no such split.*train"),
    "several_validation_splits": (
        {"train": table(FOUR), "validation_a": table(FOUR), "validation_b": table(FOUR)},
        {},
        "validation_a, validation_b. Choose one: `eval_split=validation_a`",
    ),
    "no_split_to_train_on": ({"validation": table(FOUR), "test": table(FOUR)}, {}, "No split to train on"),
    "no_usual_split": ({"all": table(FOUR)}, {}, "`train_split`; splits: all"),
    "fraction_0": (table(FOUR), {"test_fraction": 0.0}, r"`test_fraction=0.0` is outside \(0, 1\)"),
    "fraction_1": (table(FOUR), {"test_fraction": 1.0}, "`test_fraction=1.0`"),
    "fraction_nan": (table(FOUR), {"test_fraction": float("nan")}, "`test_fraction=nan`"),
    "no_train_samples": (table(FOUR), {"max_train_samples": 0}, "`max_train_samples=0`"),
    "no_eval_samples": (table(FOUR), {"max_eval_samples": -1}, "`max_eval_samples=-1`"),
}


@pytest.mark.parametrize(("data", "options", "message"), ERRORS.values(), ids=ERRORS)
def test_what_cannot_be_used_is_named(data, options, message):
    with pytest.raises(InputError, match=message) as error:
        load(data, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [{}, {"dataset_name": "a/b", "data_dir": "c"}], ids=["none", "both"])
def test_one_source_is_given(options):
    with pytest.raises(InputError, match=r"either `dataset_name` .* or `data_dir`"):
        load_splits(**options)


def test_a_dataset_that_does_not_load_is_an_input_error(tmp_path: Path):
    with pytest.raises(InputError, match=f"Cannot load `dataset_name={tmp_path}/nowhere`"):
        load_splits(dataset_name=str(tmp_path / "nowhere"))
    table([0, 1]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"_name=odd`: .*'odd' not found.*default"):
        load_splits(dataset_name=str(tmp_path), dataset_config_name="odd")


def test_no_secret_is_told(monkeypatch):
    token = "hf_" + "aB3" * 11

    def fail(*args, **kwargs):
        raise ConnectionError(f"403 for https://user:pass@hub/x?Signature=abc&Expires=1\nwith Bearer {token}")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    with pytest.raises(InputError) as error:
        load_splits(dataset_name=f"https://{token}@hub/x")
    message = str(error.value)
    assert not re.search(rf"{token}|Signature|pass@|\n", message)
    assert "403 for https://hub/x with Bearer hf_***" in message


def test_a_test_split_waits_for_the_end(tmp_path):
    splits = load({"train": table([0, 1, 2] * 20), "test": table([0, 1, 2])})
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (51, 9, 3)
    assert not ids(splits.train) & ids(splits.validation)
    assert "set aside" in splits.describe()


@pytest.mark.parametrize(
    "test",
    [
        table([-1] * 4),
        table([None] * 4),
        table([None] * 4, Value("string")),
        table([0, 1]).remove_columns("label"),
    ],
    ids=["minus_one", "none", "no_text", "no_column"],
)
def test_a_split_without_labels_is_left_out_and_said(test):
    splits = load({"train": table([0, 1, 2] * 4), "test": test, "validation": table([0, 1])})
    assert splits.test is None
    assert f"{len(test)} images of split 'test' left out: no labels" in splits.describe()
    assert splits.skipped == [SkippedImage(f"row {i}", "test", "no labels") for i in range(len(test))]
    with pytest.raises(InputError, match=r"no label|no such column"):
        load({"train": table([0, 1, 2] * 4), "test": test}, eval_split="test")


def test_a_split_that_is_not_used_is_said():
    splits = load({"train": table([0, 1]), "val": table([0, 1]), "extra": table([2] * 1200)})
    assert "1,200 images of split 'extra' left out" in splits.describe()


def test_rows_keep_their_label():
    labels = np.random.default_rng(0).integers(0, 3, 200).tolist()
    splits = load(table(labels), max_train_samples=60)
    for row in [*splits.train, *splits.validation]:
        assert row["label"] == labels[int(row["image"]["bytes"].split()[1])]
