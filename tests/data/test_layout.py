"""Splits are told from classes, and what may be both is refused with the command that resolves it."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from entame_hf.data import Splits, load_splits
from entame_hf.data.splits import split_kinds
from entame_hf.errors import InputError


@pytest.fixture
def tree(tmp_path: Path):
    def make(*folders: str, count: int = 4) -> str:
        for folder in folders:
            for i in range(count):
                file = tmp_path / "data" / folder / f"{i}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
        return str(tmp_path / "data")

    return make


def of(names: str, classes: str, inside: str = "") -> list[str]:
    """Give the paths of class folders in split folders."""
    return [f"{name}/{inside.format(name)}{c}" for name in names.split() for c in classes.split()]


def found(splits: Splits) -> dict[str, str]:
    """Give where the images of each split come from: the folder at the top."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    tops = {
        role: {path["path"].split("/data/")[-1].split(os.sep)[0] for path in part["image"]}
        for role, part in parts.items()
        if part is not None
    }
    return {role: " ".join(sorted(names)) for role, names in tops.items()}


SPLITS = {
    "kaggle_scenes": (
        [*of("seg_train seg_test", "sea glacier", "{0}/"), "seg_pred/seg_pred"],
        {"train": "seg_train", "validation": "seg_train", "test": "seg_test"},
        ["4 images of .*seg_pred left out: no labels"],
    ),
    "training_and_validation": (
        of("training validation", "cat dog"),
        {"train": "training", "validation": "validation"},
        [],
    ),
    "sets": (
        of("training_set test_set", "cat dog"),
        {"train": "training_set", "validation": "training_set", "test": "test_set"},
        [],
    ),
    "wrapped_sets": (
        of("training_set test_set", "cat dog", "{0}/"),
        {"train": "training_set", "validation": "training_set", "test": "test_set"},
        [],
    ),
    "flat_test": (
        [*of("train", "cat dog"), "test1"],
        {"train": "train", "validation": "train"},
        ["4 images of .*test1 left out: no labels"],
    ),
    "unlabeled": (
        [*of("train val", "cat dog"), "unlabeled"],
        {"train": "train", "validation": "val"},
        ["4 images of .*unlabeled left out"],
    ),
    "unlabeled_in_folders": (
        [*of("train val", "cat dog"), "unlabeled/a", "unlabeled/b"],
        {"train": "train", "validation": "val"},
        ["8 images of .*unlabeled left out"],
    ),
    "flat_test_in_itself": (
        [*of("train", "cat dog"), "test/test"],
        {"train": "train", "validation": "train"},
        ["4 images of .*test left out"],
    ),
    "flat_test_in_images": (
        [*of("train", "cat dog"), "test/images"],
        {"train": "train", "validation": "train"},
        ["4 images of .*test left out"],
    ),
    "flat_validation": (
        [*of("train", "cat dog"), "val"],
        {"train": "train", "validation": "train"},
        ["4 images of .*val left out"],
    ),
    "years": (of("train2017 val2017", "cat dog"), {"train": "train2017", "validation": "val2017"}, []),
    "prefixed": (
        of("pets_train pets_valid pets_test", "cat dog"),
        {"train": "pets_train", "validation": "pets_valid", "test": "pets_test"},
        [],
    ),
    "camel_case": (
        of("TrainImages TestImages", "cat dog"),
        {"train": "TrainImages", "validation": "TrainImages", "test": "TestImages"},
        [],
    ),
    "held_out": (of("Train held-out", "cat dog"), {"train": "Train", "validation": "held-out"}, []),
    "train_alone": (of("train", "cat dog"), {"train": "train", "validation": "train"}, []),
    "beside_text": (of("train val", "cat dog"), {"train": "train", "validation": "val"}, []),
    "unlabeled_in_train": (
        [*of("train val", "cat dog"), "train/unlabeled"],
        {"train": "train", "validation": "val"},
        ["4 images of .*unlabeled left out"],
    ),
    "relative_of_validation": (
        of("train validation_matched test", "cat dog"),
        {"train": "train", "validation": "validation_matched", "test": "test"},
        [],
    ),
    "relative_of_test": (
        of("train test_hard", "cat dog"),
        {"train": "train", "validation": "train", "test": "test_hard"},
        [],
    ),
    "images_inside": (of("train val", "cat dog", "images/"), {"train": "train", "validation": "val"}, []),
}


@pytest.mark.parametrize(("folders", "expected", "notes"), SPLITS.values(), ids=SPLITS)
def test_folders_of_classes_with_names_of_splits_are_splits(tree, folders, expected, notes):
    splits = load_splits(data_dir=tree(*folders))
    assert found(splits) == expected
    assert len(splits.class_names) == 2
    said = splits.describe()
    for note in notes:
        assert re.search(note, said)
    used = sum(len(part) for part in (splits.train, splits.validation, splits.test) if part is not None)
    assert used + len(splits.skipped) == 4 * len(folders)


@pytest.mark.parametrize("test", ["test", "testing", "val", "Test_set"])
def test_each_class_may_have_its_splits(tree, test):
    folders = [f"{name}/{split}" for name in ("cat", "dog", "owl") for split in ("train", test)]
    splits = load_splits(data_dir=tree(*folders, "unlabeled", "test1"))
    assert splits.class_names == ["cat", "dog", "owl"]
    evaluated = splits.validation if test == "val" else splits.test
    assert {path["path"].split("/")[-2] for path in evaluated["image"]} == {test}
    assert {path["path"].split("/")[-2] for path in splits.train["image"]} == {"train"}
    assert [skipped.split for skipped in splits.skipped] == ["test1"] * 4 + ["unlabeled"] * 4


@pytest.mark.parametrize("wrapping", ["photos", "photos/all", "photos.v2/deep/er"])
@pytest.mark.parametrize("layout", ["", "train/"])
def test_a_wrapping_folder_is_peeled_off(tree, wrapping, layout):
    root = tree(f"{wrapping}/{layout}cat", f"{wrapping}/{layout}dog")
    (Path(root) / "README.md").touch()
    assert load_splits(data_dir=root).class_names == ["cat", "dog"]


def test_images_beside_a_wrapping_folder_are_said(tree):
    root = tree("photos/cat", "photos/dog")
    (Path(root) / "cover.jpg").touch()
    splits = load_splits(data_dir=root)
    assert "1 image of " in splits.describe()
    assert [os.path.basename(image) for image, _, _ in splits.skipped] == ["cover.jpg"]


CLASSES = {
    "vehicles": (["train", "bus", "car"], "bus car train"),
    "vehicles_with_one_folder_each": (["train/x", "test/y", "car/z"], "car test train"),
    "names_that_hold_a_split_name": (["devices", "testudo", "trainers"], "devices testudo trainers"),
    "steam_train": (["steam train", "bus"], "bus steam train"),
    "nested": (["cat/2019", "cat/2020", "dog/2021"], "cat dog"),
    "unlabeled_beside_classes": (["cat", "dog", "unlabeled"], "cat dog"),
}


@pytest.mark.parametrize(("folders", "names"), CLASSES.values(), ids=CLASSES)
def test_folders_without_a_sign_of_splits_are_classes(tree, folders, names):
    assert " ".join(load_splits(data_dir=tree(*folders)).class_names) == names


@pytest.mark.parametrize("split", ["", "train/"])
def test_folders_in_a_class_are_said(tree, split):
    root = tree(
        *(f"{split}{folder}" for folder in ("animals/cat", "animals/dog", "vehicles/car", "vehicles/bus", "art"))
    )
    said = load_splits(data_dir=root).describe()
    assert said.count("class 'animals' holds 2 folders (cat, dog), whose images are all of this class.") == 1
    assert "class 'art' holds" not in said


AMBIGUOUS = {
    "kaggle_flat": (["train", "test"], r"train, test|test, train.*`data_layout=CLASS`"),
    "flat_training_and_validation": (["training", "validation"], "`data_layout=CLASS`"),
    "flat_sets_of_images": (["train_images", "test_images"], "metadata.csv.*`data_layout=CLASS`"),
    "images_beside_boxes": (
        ["train/images", "val/images"],
        "no class folders.*metadata.csv",
    ),
    "flat_beside_a_stranger": (["train", "test", "extra"], "`data_layout=CLASS`"),
    "flat_beside_classes": (["train", "test", "car/x", "bus/x"], "`data_layout=CLASS`"),
    "test_beside_classes": (["cat", "dog", "test"], "test in .* may be classes beside cat, dog.*`data_layout=CLASS`"),
    "nested_test_beside_classes": (["cat", "dog", "test/cat", "test/dog"], "`data_layout=CLASS`"),
    "no_train": (["val/x", "val/y", "test/x"], "none to train on. Choose one: `train_split=test`"),
    "one_flat_split": (["train"], "no class folders"),
    "stranger_like_a_split": ([*of("Train held", "a b")], "a folder 'a'.*`train_split=Train` `eval_split=held`"),
    "copy_beside_splits": (
        [*of("train test", "a b"), *of("again/train again/test", "a b")],
        "no split is called again.*give `train_split=train`, and",
    ),
    "images_beside_masks": (["images/train", "images/val", "masks"], "holds splits .*give `data_dir=.*images`"),
    "stranger_beside_splits": ([*of("train val", "a b"), "extra"], "no split is called extra.*`train_split=train`"),
    "stranger_beside_train": ([*of("train", "a b"), "extra"], "no split is called extra.*`train_split=train`"),
    "folds": (of("fold1 fold2 fold3", "cat dog"), "`train_split=fold1` `eval_split=fold2`.*`data_layout=CLASS`"),
    "stranger_and_test": (of("mine test", "cat dog"), "`train_split=mine`"),
    "splits_of_some_classes": (["cat/train", "cat/test", "dog/train", "dog/test", "owl"], "owl holds none"),
}


@pytest.mark.parametrize(("folders", "message"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_may_be_both_is_refused_with_a_command(tree, folders, message):
    with pytest.raises(InputError, match=message):
        load_splits(data_dir=tree(*folders))


@pytest.mark.parametrize(
    ("folders", "options", "classes", "expected"),
    [
        (["train", "test"], {"data_layout": "CLASS"}, "test train", None),
        (["cat", "dog", "test"], {"data_layout": "CLASS"}, "cat dog test", None),
        (["cat/a", "cat/b", "dog/a", "dog/b"], {"data_layout": "CLASS"}, "cat dog", None),
        (
            of("fold1 fold2 fold3", "cat dog"),
            {"train_split": "fold1", "eval_split": "fold2"},
            "cat dog",
            ("fold1", "fold2"),
        ),
        ([*of("Train held", "a b"), "x"], {"train_split": "Train", "eval_split": "held"}, "a b", ("Train", "held")),
        ([*of("train val", "a b"), "extra"], {"train_split": "train"}, "a b", ("train", "val")),
        (of("mine test", "cat dog"), {"train_split": "mine", "eval_split": "test"}, "cat dog", ("mine", "test")),
        (of("val test", "x y"), {"train_split": "val", "eval_split": "test"}, "x y", ("val", "test")),
    ],
)
def test_the_command_resolves_it(tree, folders, options, classes, expected):
    splits = load_splits(data_dir=tree(*folders), **options)
    assert " ".join(splits.class_names) == classes
    if expected:
        assert (found(splits)["train"], found(splits)["validation"]) == expected


@pytest.mark.parametrize("name", ["train/", "trian"])
@pytest.mark.parametrize("option", ["train_split", "eval_split"])
def test_a_split_that_is_not_there_is_refused(tree, option, name):
    with pytest.raises(InputError, match=f"`{option}={name}`: no such split. Splits: .*train"):
        load_splits(data_dir=tree(*of("train test", "cat dog")), **{option: name})


def test_a_layout_is_one_of_four(tree):
    with pytest.raises(InputError, match=r"`data_layout=folders`: no such layout\. Layouts: auto, CLASS, SPLIT/CLASS"):
        load_splits(data_dir=tree("a", "b"), data_layout="folders")


def test_three_lines_say_what_was_understood(tree):
    lines = load_splits(data_dir=tree(*of("train val", "cat dog"))).describe().splitlines()
    assert lines == [
        "Splits: train 8 (train), validation 8 (val); read as DATA_DIR/SPLIT/CLASS.",
        "Classes: 2: cat, dog.",
        "Images a class in train: cat 4, dog 4.",
    ]


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        ("train val test", "train validation test"),
        ("trainval test1", "train test"),
        ("ILSVRC2012_img_train ILSVRC2012_img_val", "train validation"),
        ("seg_train bus", ""),
        ("unlabelled unsupervised train", "unlabeled unlabeled train"),
        ("test_unlabeled train", "unlabeled train"),
    ],
)
def test_one_table_of_split_names(names, kinds):
    assert " ".join(split_kinds(names.split()).values()) == kinds


COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.skipif(os.name != "posix", reason="some file systems normalise names")
def test_names_are_one_in_either_unicode_form(tree):
    splits = load_splits(data_dir=tree(f"train/{COMPOSED}", "train/tea", f"val/{DECOMPOSED}", "val/tea"))
    assert splits.class_names == [COMPOSED, "tea"]
    assert Counter(splits.validation["label"]) == {0: 4, 1: 4}
    merged = load_splits(data_dir=tree(f"train/{DECOMPOSED}"))
    assert Counter(merged.train["label"]) == {0: 8, 1: 4}


@pytest.mark.parametrize(
    ("one", "other", "points"),
    [("Cat", "cat", "U+0043"), ("a b", "a_b", r"U\+005F"), ("01", "1", "U+0030"), ("1.0", "1", "U+002E")],
)
def test_names_that_look_alike_are_said(tree, one, other, points):
    said = load_splits(data_dir=tree(one, other, "zebra")).describe()
    assert "classes look alike" in said
    assert points.replace("\\", "") in said


@pytest.mark.parametrize("other", ["cat ", "c\u200bat", "\u0441at", "\uff43at"], ids=ascii)
def test_names_that_look_the_same_are_refused(tree, other):
    with pytest.raises(InputError, match=r"Classes that look the same: .*U\+"):
        load_splits(data_dir=tree("cat", other))


def test_an_unknown_class_is_told_with_what_it_looks_like(tree):
    with pytest.raises(InputError, match=r"'cat' \(U\+0063 U\+0061 U\+0074\) looks like 'Cat' \(U\+0043"):
        load_splits(data_dir=tree("train/Cat", "train/dog", "val/cat"))


@pytest.mark.parametrize("name", ["nan", "None", "NA", "null", "-1"])
def test_classes_that_may_be_missing_labels_are_said(tree, name):
    assert (
        f"class '{name}', 4 images, is taken for a class"
        in load_splits(data_dir=tree(*of("train val", f"cat {name}"))).describe()
    )


@pytest.mark.parametrize("name", ["cat, dog", "dog cat", "cat+dog", "['cat', 'dog']"])
def test_classes_that_may_be_several_labels_are_said(tree, name):
    said = load_splits(data_dir=tree("cat", "dog", name)).describe()
    assert f"1 class may be several labels an image, such as {name!r}: each is trained as a class" in said


@pytest.mark.parametrize("name", ["polar bear", "cat bird", "cat/2019", "a-b"])
def test_other_names_of_several_words_are_not(tree, name):
    assert "several labels" not in load_splits(data_dir=tree("cat", "dog", name)).describe()


REPEATED = {
    "a_copy_inside": (["cat", "dog", "photos/cat", "photos/dog"], "CLASS"),
    "of_one_class": (["cat", "dog", "new/cat"], "CLASS"),
    "in_a_split": (["train/cat", "train/dog", "train/test/cat", "val/cat", "val/dog"], "SPLIT/CLASS"),
}


@pytest.mark.parametrize(("folders", "layout"), REPEATED.values(), ids=REPEATED)
def test_folders_of_the_classes_beside_them_are_refused(tree, folders, layout):
    root = tree(*folders)
    with pytest.raises(InputError, match=f"holds cat.*, as the classes beside it.*`data_layout={layout}`"):
        load_splits(data_dir=root)
    assert len(load_splits(data_dir=root, data_layout=layout).class_names) == 3


@pytest.mark.parametrize("folders", [["cat/cat", "dog/dog"], ["cat", "cat/dog", "dog"]], ids=["same_name", "files"])
def test_folders_in_a_class_with_images_are_of_it(tree, folders):
    assert load_splits(data_dir=tree(*folders)).class_names == ["cat", "dog"]
