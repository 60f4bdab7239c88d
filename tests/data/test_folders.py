"""Folders of images become splits and classes, and junk stays out."""

import os
import zipfile
from pathlib import Path

import datasets
import pytest

from entame_hf.data import archives, load_image_folder
from entame_hf.errors import InputError


@pytest.fixture
def tree(tmp_path: Path):
    """Make (empty) files: the scan must not look into them."""

    def make(*paths: str) -> Path:
        for path in paths:
            file = tmp_path / "data" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        return tmp_path / "data"

    return make


def rows(dataset: datasets.Dataset, root: Path) -> list[tuple[str, str]]:
    names = dataset.features["label"].names
    return [(names[row["label"]], os.path.relpath(row["image"]["path"], root).replace(os.sep, "/")) for row in dataset]


def names(dataset: datasets.Dataset) -> list[str]:
    return dataset.features["label"].names


def test_classes_at_the_top_are_one_split(tree):
    root = tree("dog/b.jpg", "dog/a.PNG", "cat/c.webp")
    loaded = load_image_folder(root)
    assert list(loaded) == ["train"]
    assert rows(loaded["train"], root) == [("cat", "cat/c.webp"), ("dog", "dog/a.PNG"), ("dog", "dog/b.jpg")]
    assert loaded["train"].features["image"] == datasets.Image(decode=False)


@pytest.mark.parametrize("validation", ["validation", "val", "valid", "Val", "dev", "eval", "evaluation"])
def test_split_folders_are_splits(tree, validation):
    root = tree("train/a/1.jpg", "train/b/1.jpg", f"{validation}/b/2.jpg", "test/a/3.jpg")
    loaded = load_image_folder(root)
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 2, "validation": 1, "test": 1}
    assert {tuple(names(dataset)) for dataset in loaded.values()} == {("a", "b")}
    assert rows(loaded["validation"], root) == [("b", f"{validation}/b/2.jpg")]


@pytest.mark.parametrize(
    ("paths", "classes"),
    [
        (["train/x/1.jpg", "test/y/1.jpg", "car/z/1.jpg"], ["car", "test", "train"]),
        (["train/1.jpg", "test/1.jpg", "car/x/1.jpg", "bus/x/1.jpg"], ["bus", "car", "test", "train"]),
        (["train/1.jpg", "test/1.jpg"], ["test", "train"]),
        (["val/x/1.jpg", "test/y/1.jpg"], ["test", "val"]),
    ],
    ids=["another_class_beside", "flat_beside_others", "images_directly_inside", "no_train"],
)
def test_split_names_may_be_classes(tree, paths, classes):
    assert names(load_image_folder(tree(*paths))["train"]) == classes


def test_classes_are_sorted_as_strings(tree):
    odd = ["10", "2", "B", "a", "chat noir", "été", "-1", "x.jpg", "猫"]
    root = tree(*(f"{name}/1.jpg" for name in odd))
    assert names(load_image_folder(root)["train"]) == sorted(odd)
    assert names(load_image_folder(root)["train"]).index("10") < names(load_image_folder(root)["train"]).index("2")
    assert load_image_folder(root)["train"]["label"][:] == list(range(len(odd)))


def test_nested_images_are_found_and_junk_is_not(tree):
    root = tree(
        "a/deep/er/1.jpg",
        "a/._1.jpg",
        "a/Thumbs.db",
        "a/.ipynb_checkpoints/1.jpg",
        "a/__MACOSX/1.jpg",
        "a/notes.txt",
        "a/page.html",
        "b/2.jpeg",
        "__MACOSX/a/1.jpg",
        ".cache/1.jpg",
        ".ipynb_checkpoints/1.jpg",
        "README.md",
        "top.jpg",
    )
    assert rows(load_image_folder(root)["train"], root) == [("a", "a/deep/er/1.jpg"), ("b", "b/2.jpeg")]


def test_links_are_followed_once(tree, tmp_path):
    root = tree("a/1.jpg", "b/2.jpg")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "3.jpg").touch()
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "loop").symlink_to(root / "a")
    (root / "b" / "4.jpg").symlink_to(tmp_path / "elsewhere" / "3.jpg")
    assert [path for _, path in rows(load_image_folder(root)["train"], root)] == [
        "a/1.jpg",
        "b/2.jpg",
        "b/4.jpg",
        "c/3.jpg",
    ]


def test_paths_are_absolute(tree, monkeypatch):
    monkeypatch.chdir(tree("a/1.jpg", "b/1.jpg").parent)
    assert os.path.isabs(load_image_folder("data")["train"][0]["image"]["path"])


def test_a_class_may_be_missing_or_empty_in_test(tree):
    root = tree("train/a/1.jpg", "train/b/1.jpg", "test/a/1.jpg", "test/c/notes.txt")
    (root / "test" / "b").mkdir()
    assert len(load_image_folder(root)["test"]) == 1


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["only/1.jpg"], "one class only, 'only'"),
        (["1.jpg", "2.jpg"], r"No image in a class folder.*DATA_DIR/CLASS/"),
        (["a/1.txt", "b/1.heic"], r"No image in a class folder.*suffixes read: .*\.jpg"),
        (["a/1.jpg", "b/1.jpg", "empty/1.txt"], "'empty' of .* has no image to train on"),
        (
            ["train/a/1.jpg", "train/b/1.jpg", "test/a/1.jpg", "test/zebra/1.jpg"],
            "'zebra' is in test but not",
        ),
        (["train/a/1.jpg", "train/b/1.jpg", "val/c/1.jpg"], "'c' is in validation but not"),
        (["train/a/1.jpg", "train/b/1.jpg", "test/a/1.txt"], "split 'test'"),
        (["train/a/1.jpg", "train/b/1.jpg", "test/1.jpg"], "test holds no class folders"),
        (["train/a/1.jpg", "train/b/1.jpg", "val/a/1.jpg", "valid/a/1.jpg"], "are the same split"),
        (
            ["Train/a/1.jpg", "Train/b/1.jpg", "held/b/1.jpg"],
            "Train and held beside it both hold a folder 'b'.*no split is called held.*Splits: train, validation",
        ),
        (["train/a/1.jpg", "train/b/1.jpg", "val/b/1.jpg", "extra/1.jpg"], "no split is called extra"),
    ],
    ids=[
        "one_class",
        "flat",
        "no_image",
        "empty_class",
        "unknown_in_test",
        "unknown_in_validation",
        "empty_split",
        "flat_test",
        "split_twice",
        "split_of_another_name",
        "folder_beside_splits",
    ],
)
def test_what_cannot_be_used_is_named(tree, paths, message):
    with pytest.raises(InputError, match=message) as error:
        load_image_folder(tree(*paths))
    assert "\n" not in str(error.value)


def test_the_path_must_be_a_folder(tree, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_image_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match="is a file, neither a folder nor a zip"):
        load_image_folder(tree("a/1.jpg") / "a" / "1.jpg")


@pytest.mark.skipif(os.name == "nt", reason="file names are UTF-16 there")
def test_a_file_name_that_is_not_utf8_is_named(tree):
    root = tree("a/1.jpg", "b/1.jpg")
    with open(os.path.join(os.fsencode(root), b"a", b"\xff.jpg"), "wb"):
        pass
    with pytest.raises(InputError, match="not UTF-8"):
        load_image_folder(root)


@pytest.mark.parametrize("wrapping", ["", "photos/", "a/b/"])
def test_a_zip_is_its_folder(tree, tmp_path, monkeypatch, wrapping):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    root = tree("train/10/1.jpg", "train/2, or/1.png", "test/10/é.jpg")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for path in (*root.rglob("*.jpg"), *root.rglob("*.png")):
            archive.writestr(wrapping + path.relative_to(root).as_posix(), b"image")
        archive.writestr("__MACOSX/train/10/._1.jpg", b"")
        archive.writestr(wrapping + "train/10/notes.txt", b"")
        archive.writestr("../outside.jpg", b"")
    first, second = (load_image_folder(tmp_path / "photos.zip") for _ in range(2))
    assert names(first["train"]) == ["10", "2, or"]
    assert {split: len(part) for split, part in first.items()} == {"train": 2, "test": 1}
    assert first["train"]["image"] == second["train"]["image"]
    assert not (tmp_path / "cache" / "outside.jpg").exists()


def test_a_zip_that_cannot_be_unpacked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    with zipfile.ZipFile(tmp_path / "broken.zip", "w") as archive:
        archive.writestr("a/1.jpg", b"0" * 1000)
    data = (tmp_path / "broken.zip").read_bytes()
    (tmp_path / "broken.zip").write_bytes(data.replace(b"0" * 1000, b"1" * 1000))
    with pytest.raises(InputError, match=r"broken\.zip cannot be unpacked: Bad CRC-32"):
        load_image_folder(tmp_path / "broken.zip")
    assert not list((tmp_path / "cache" / "entame_hf").iterdir())


def write_zip(path: Path, text: str) -> str:
    """Write a zip of two images; return where it is unpacked."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("a/1.jpg", "b/1.jpg"):
            archive.writestr(name, text)
    return os.path.dirname(os.path.dirname(load_image_folder(path)["train"][0]["image"]["path"]))


@pytest.fixture
def leave():
    """Leave all unpacked zips, as the end of a process does."""

    def leave_all() -> None:
        for folder in list(archives._used):
            archives._leave(folder)

    yield leave_all
    leave_all()


@pytest.mark.skipif(os.name == "nt", reason="nothing can be locked there")
def test_a_new_version_of_a_zip_replaces_what_nobody_uses(tmp_path, monkeypatch, leave):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    first = write_zip(tmp_path / "photos.zip", "1")
    other = write_zip(tmp_path / "other.zip", "1")
    assert load_image_folder(tmp_path / "photos.zip")["train"]
    second = write_zip(tmp_path / "photos.zip", "22")
    # The first is in use, by this process.
    assert all(os.path.isdir(folder) for folder in (first, second, other))
    leave()
    third = write_zip(tmp_path / "photos.zip", "333")
    assert not any(os.path.exists(folder) for folder in (first, second))
    assert sorted(os.listdir(tmp_path / "cache" / "entame_hf")) == sorted(map(os.path.basename, (third, other)))


@pytest.mark.skipif(os.name == "nt", reason="nothing can be locked there")
def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch, leave):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "cache" / "entame_hf"
    (folder / "tmpleft" / "a").mkdir(parents=True)
    (folder / "tmpbusy").mkdir()
    archives._use(folder / "tmpbusy")
    unpacked = write_zip(tmp_path / "photos.zip", "1")
    assert sorted(os.listdir(folder)) == ["tmpbusy", os.path.basename(unpacked)]
