"""Splits below classes and classes below splits: what would train on the wrong folders is refused."""

import re
from pathlib import Path

import pytest
from test_layout import of, tree  # noqa: F401

from entame_hf.data import load_splits
from entame_hf.errors import InputError


@pytest.mark.parametrize("names", ["fold1 fold2", "siteA siteB", "40X 100X 400X", "2019 2020"])
@pytest.mark.parametrize("inside", ["train val", "training testing", "train test val"])
def test_folds_with_splits_of_their_own_are_no_classes(tree, names, inside):  # noqa: F811
    folders = [f"{name}/{split}/{c}" for name in names.split() for split in inside.split() for c in ("cat", "dog")]
    root = tree(*folders)
    with pytest.raises(InputError, match=r"hold the same folders .*cat.*dog.*`data_dir=.*`; if .* are the classes"):
        load_splits(data_dir=root)
    first = names.split()[0]
    assert load_splits(data_dir=f"{root}/{first}").class_names == ["cat", "dog"]
    assert load_splits(data_dir=root, data_layout="CLASS/SPLIT").class_names == sorted(names.split())


def test_classes_with_splits_may_hold_one_folder_each(tree):  # noqa: F811
    root = tree(*(f"{name}/{split}/images" for name in ("cat", "dog") for split in ("train", "test")))
    splits = load_splits(data_dir=root)
    assert (splits.class_names, len(splits.train) + len(splits.validation), len(splits.test)) == (["cat", "dog"], 8, 8)


@pytest.mark.parametrize("stray", ["2019/checksums", "2019/preview.png", "2020/cover.jpg"])
def test_a_stray_file_changes_nothing(tree, stray):  # noqa: F811
    root = tree(*of("2019 2020", "cat dog"))
    (Path(root) / stray).touch()
    with pytest.raises(InputError, match="all hold cat, dog"):
        load_splits(data_dir=root)


@pytest.mark.parametrize("stray", ["preview.png", "sums"])
def test_a_stray_file_makes_no_class_of_a_copy(tree, stray):  # noqa: F811
    root = tree("cat", "dog", "photos/cat", "photos/dog")
    (Path(root) / "photos" / stray).touch()
    with pytest.raises(InputError, match="photos holds cat, dog, as the classes beside it"):
        load_splits(data_dir=root)


@pytest.mark.parametrize(
    ("folders", "inside"),
    [
        (["cat", "dog", "cat/test", "dog/test"], "cat/test"),
        (["cat", "dog", "cat/val", "dog/val"], "cat/val"),
        (["cat", "dog", "dog/validation"], "dog/validation"),
        (["cat/new", "cat/test", "dog/old", "dog/test"], "cat/test"),
        (["cat/val", "cat/test", "dog"], "cat/test"),
    ],
)
def test_splits_in_class_folders_are_not_trained_on(tree, folders, inside):  # noqa: F811
    root = tree(*folders)
    with pytest.raises(
        InputError, match=f"{re.escape(inside)} lies in the class folder .* name of a split"
    ) as refused:
        load_splits(data_dir=root)
    assert "`data_layout=CLASS`" in str(refused.value)
    splits = load_splits(data_dir=root, data_layout="CLASS")
    assert splits.class_names == ["cat", "dog"]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["vehicle/car", "vehicle/train", "tree/oak", "tree/pine"], ["tree", "vehicle"]),
        (["rice/development", "rice/mature", "wheat"], ["rice", "wheat"]),
        (["benign/adenosis/test 1", "malignant/lobular/test 2"], ["benign", "malignant"]),
        ([f"{split}/{name}" for split in ("train", "test") for name in ("road/train", "road/bus", "tree/oak")], None),
        (["train/valid", "train/invalid"], ["invalid", "valid"]),
    ],
)
def test_folders_of_such_names_may_be_of_a_class(tree, folders, names):  # noqa: F811
    assert load_splits(data_dir=tree(*folders)).class_names == (names or ["road", "tree"])


def test_a_split_may_hold_no_class_of_another_splits_name(tree):  # noqa: F811
    root = tree(*of("train val", "cat dog"), "train/test")
    with pytest.raises(InputError, match="train/test has the name of a split"):
        load_splits(data_dir=root)
    assert load_splits(data_dir=root, data_layout="SPLIT/CLASS").class_names == ["cat", "dog", "test"]


@pytest.mark.parametrize("name", ["test", "train"])
def test_a_class_that_all_splits_hold_is_one(tree, name):  # noqa: F811
    root = tree(*of("train val", f"cat {name}"))
    assert load_splits(data_dir=root).class_names == ["cat", name]


@pytest.mark.parametrize("spelling", ["{}_test", "{} val", "test_{}", "{}-validation"])
def test_folders_of_splits_of_others_are_no_classes(tree, spelling):  # noqa: F811
    root = tree("cat", "dog", *map(spelling.format, ("cat", "dog")))
    with pytest.raises(InputError, match=r"have names of splits of cat, dog.*move .*DATA_DIR/(test|valid)"):
        load_splits(data_dir=root)
    assert len(load_splits(data_dir=root, data_layout="CLASS").class_names) == 4


@pytest.mark.parametrize("name", ["cat_test", "pregnancy test"])
def test_one_such_folder_may_be_a_class(tree, name):  # noqa: F811
    assert load_splits(data_dir=tree("cat", "pregnancy", name)).class_names == sorted(["cat", "pregnancy", name])
