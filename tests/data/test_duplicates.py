"""Files that are in two splits are said with counts before training."""

import os
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Image

from entame_hf.data import duplicates, load_splits, split_dataset

LABELS = ClassLabel(names=["cat", "dog"])


def folder(root: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return str(root)


def own(i: int) -> bytes:
    return b"%04d" % i * 10


TRAIN = {f"train/{name}/{i}.jpg": own(i + 100 * (name == "dog")) for name in ("cat", "dog") for i in range(6)}


@pytest.mark.parametrize(
    ("held", "notes"),
    [
        ({"val/cat/a.jpg": own(3), "val/dog/b.jpg": own(900)}, ["1 image of validation is in train too, such as"]),
        ({"val/dog/a.jpg": own(3), "val/cat/b.jpg": own(4)}, ["2 images of validation are in train too, 1 of them"]),
        (
            {"val/cat/a.jpg": own(900), "test/cat/b.jpg": own(1), "test/dog/c.jpg": own(101)},
            ["2 images of test are in train too, such as"],
        ),
        ({"val/cat/a.jpg": own(900), "val/dog/empty.jpg": b""}, []),
    ],
    ids=["one", "other_label", "test", "none"],
)
def test_files_that_are_in_train_too_are_counted(tmp_path, held, notes):
    lines = load_splits(data_dir=folder(tmp_path, TRAIN | held)).describe().splitlines()
    said = [line for line in lines if "in train too" in line]
    assert len(said) == len(notes)
    for line, note in zip(said, notes, strict=True):
        assert line.startswith(f"Note: {note}")


TWO_LABELS = [(own(1), "cat"), (own(2), "cat"), (own(2), "cat"), (own(3), "cat"), (own(3), "dog"), (own(4), "dog")]


def test_files_of_train_with_two_labels_are_counted(tmp_path):
    """A copied folder, a wrong label: whoever made the dataset wants to know."""
    files = {f"train/{label}/{i}.jpg": content for i, (content, label) in enumerate(TWO_LABELS)}
    splits = load_splits(data_dir=folder(tmp_path, files | {"val/cat/a.jpg": own(50), "val/dog/b.jpg": own(51)}))
    assert "Note: 1 image of train is there with another label too, such as" in splits.describe()


def test_rows_of_train_with_two_labels_are_counted():
    def table(rows):
        contents, labels = zip(*rows, strict=True)
        columns = {"image": [{"bytes": content, "path": None} for content in contents], "label": labels}
        return Dataset.from_dict(columns, features=Features({"image": Image(decode=False), "label": LABELS}))

    splits = split_dataset({"train": table(TWO_LABELS), "validation": table([(own(50), "cat"), (own(51), "dog")])})
    assert "1 image of train is there with another label too, such as row 4 and row 3." in splits.describe()


def test_links_are_the_same_file(tmp_path):
    root = folder(tmp_path, TRAIN)
    os.makedirs(tmp_path / "val" / "cat")
    (tmp_path / "val" / "cat" / "1.jpg").symlink_to(tmp_path / "train" / "cat" / "1.jpg")
    os.link(tmp_path / "train" / "cat" / "2.jpg", tmp_path / "val" / "cat" / "2.jpg")
    assert "2 images of validation are in train too" in load_splits(data_dir=root).describe()


def test_images_that_are_set_aside_are_compared(tmp_path):
    twice = {f"{name}/{i}.jpg": own(i // 2 + 100 * (name == "dog")) for name in ("cat", "dog") for i in range(40)}
    assert "of validation are in train too" in load_splits(data_dir=folder(tmp_path, twice)).describe()


def test_images_in_tables_are_compared():
    def table(numbers):
        rows = {"image": [{"bytes": own(i), "path": None} for i in numbers], "label": [i % 2 for i in numbers]}
        return Dataset.from_dict(rows, features=Features({"image": Image(decode=False), "label": LABELS}))

    splits = split_dataset({"train": table(range(20)).select(range(10)), "validation": table(range(8, 14))})
    assert "2 images of validation are in train too, such as row 0 and row 8." in splits.describe()


def test_only_files_of_one_size_are_read(tmp_path, monkeypatch):
    sizes = {
        f"train/{name}/{i}.jpg": b"0" * (i + 10 * j) for j, name in enumerate(("cat", "dog"), 5) for i in range(6)
    }
    root = folder(tmp_path, sizes | {"val/cat/a.jpg": b"another size", "val/dog/b.jpg": b"one more"})
    read = []
    monkeypatch.setattr(duplicates, "encoded_bytes", read.append)
    splits = load_splits(data_dir=root)
    assert not read
    splits.describe()
    assert not read


def test_too_many_bytes_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(duplicates, "_MAX_BYTES", 100)
    root = folder(tmp_path, TRAIN | {"val/cat/a.jpg": own(3), "val/dog/b.jpg": own(900)})
    splits = load_splits(data_dir=root)
    assert "images of train, validation are compared with those of train at the end" in splits.describe()
    assert splits.uncompared == {"train", "validation"}
