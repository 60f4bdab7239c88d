"""Folders of images become splits and classes, and junk stays out."""

import os
import zipfile
from pathlib import Path

import pytest
from datasets import Dataset, Image

from entame_hf.data import archives, load_splits
from entame_hf.data.folders import open_folder, read_folder
from entame_hf.data.source import Source
from entame_hf.errors import InputError, printable


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


def read(root: Path, **options) -> Source:
    return read_folder(open_folder(root), **options)


def rows(dataset: Dataset, root: Path) -> list[tuple[str, str]]:
    return [(row["label"], os.path.relpath(row["image"]["path"], root).replace(os.sep, "/")) for row in dataset]


def classes(source: Source, split: str = "train") -> list[str]:
    return list(dict.fromkeys(source.splits[split]["label"]))


def sizes(source: Source) -> dict[str, int]:
    return {split: len(part) for split, part in source.splits.items()}


def test_classes_at_the_top_are_one_split(tree):
    root = tree("dog/b.jpg", "dog/a.PNG", "cat/c.webp")
    source = read(root)
    assert list(source.splits) == ["train"]
    assert rows(source.splits["train"], root) == [("cat", "cat/c.webp"), ("dog", "dog/a.PNG"), ("dog", "dog/b.jpg")]
    assert source.splits["train"].features["image"] == Image(decode=False)


@pytest.mark.parametrize("validation", ["validation", "val", "valid", "Val", "dev", "eval", "evaluation", "val_set"])
def test_split_folders_are_splits(tree, validation):
    root = tree(*(f"train/{name}/{i}.jpg" for name in "ab" for i in range(3)), f"{validation}/b/2.jpg", "test/a/3.jpg")
    splits = load_splits(data_dir=str(root))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (6, 1, 1)
    assert splits.class_names == ["a", "b"]
    assert splits.validation[0]["image"]["path"] == str(root / validation / "b/2.jpg")
    assert validation in splits.describe().splitlines()[0]


def test_classes_are_sorted_as_strings(tree):
    odd = ["10", "2", "B", "a", "chat noir", "été", "-1", "x.jpg", "猫"]
    root = tree(*(f"{name}/{i}.jpg" for name in odd for i in range(2)))
    names = load_splits(data_dir=str(root)).class_names
    assert names == sorted(odd)
    assert names.index("10") < names.index("2")


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
    source = read(root)
    assert rows(source.splits["train"], root) == [("a", "a/deep/er/1.jpg"), ("b", "b/2.jpeg")]
    assert [os.path.basename(image) for image, _, _ in source.skipped] == ["top.jpg"]
    assert any("1 image of" in note and "beside the class folders" in note for note in source.notes)


@pytest.mark.parametrize("name", ["a.heic", "b", "c.jpg_large", "d.JPG.bak", "e.dng", "f.img", "g.123"])
def test_a_file_of_any_suffix_is_a_candidate(tree, name):
    root = tree(f"cat/{name}", "dog/1.jpg")
    assert rows(read(root).splits["train"], root) == [("cat", f"cat/{name}"), ("dog", "dog/1.jpg")]


JPEG, PNG = b"\xff\xd8\xff\xe0" + bytes(99), b"\x89PNG\r\n\x1a\n" + bytes(99)


@pytest.mark.parametrize("name", ["a.txt", "b.json", "c.html", "d.php", "e.PY", "readme", "f.zip"])
@pytest.mark.parametrize(
    "content", [JPEG, PNG, b"RIFF\0\0\0\0WEBP", b"\0\0\0\x18ftypheic"], ids=["jpeg", "png", "webp", "heic"]
)
def test_an_image_counts_whatever_its_suffix(tree, name, content):
    root = tree("cat/1.jpg", "dog/1.jpg")
    (root / "cat" / name).write_bytes(content)
    assert len(read(root).splits["train"]) == 3


def test_files_of_other_types_are_counted(tree):
    source = read(tree("cat/1.jpg", "cat/1.xml", "dog/1.jpg", "dog/1.xml", "dog/list.csv", "about.pdf"))
    assert "4 files of other types ignored (.xml 2, .csv 1, .pdf 1)." in source.notes


@pytest.mark.skipif(os.name == "nt", reason="no pipes among files there")
def test_what_is_no_regular_file_is_left_to_the_decoder(tree):
    root = tree("cat/1.jpg", "dog/1.jpg")
    os.mkfifo(root / "cat" / "pipe.jpg")
    (root / "cat" / "lost.jpg").symlink_to("nowhere")
    assert len(read(root).splits["train"]) == 4


def test_links_are_followed_once(tree, tmp_path):
    root = tree("a/1.jpg", "b/2.jpg")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "3.jpg").touch()
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "a" / "loop").symlink_to(root / "a")
    (root / "b" / "4.jpg").symlink_to(tmp_path / "elsewhere" / "3.jpg")
    assert [path for _, path in rows(read(root).splits["train"], root)] == ["a/1.jpg", "b/2.jpg", "b/4.jpg", "c/3.jpg"]


def test_paths_are_absolute(tree, monkeypatch):
    monkeypatch.chdir(tree("a/1.jpg", "b/1.jpg").parent)
    assert os.path.isabs(read(Path("data")).splits["train"][0]["image"]["path"])


def test_a_class_may_be_missing_or_empty_in_test(tree):
    root = tree("train/a/1.jpg", "train/b/1.jpg", "test/a/1.jpg", "test/c/notes.txt")
    (root / "test" / "b").mkdir()
    assert sizes(read(root)) == {"train": 2, "test": 1}


TWO = [f"train/{name}/{i}.jpg" for name in "ab" for i in range(2)]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["only/1.jpg", "only/2.jpg"], "one class only to train on, 'only'"),
        (["1.jpg", "2.jpg"], r"No image in a class folder.*DATA_DIR/CLASS/"),
        (["a/1.txt", "b/1.csv"], r"No image in a class folder"),
        (["a/1.jpg", "b/1.jpg", "empty/1.txt"], "'empty' of .* has no image to train on"),
        ([*TWO, "test/a/1.jpg", "test/zebra/1.jpg"], "1 of the classes of split 'test' are not among.*'zebra'"),
        ([*TWO, "val/c/1.jpg"], "1 of the classes of split 'val' are not among.*'c'"),
        ([*TWO, "val/a/1.jpg", "valid/a/1.jpg"], "Several splits could be the validation split.*`eval_split=val`"),
    ],
    ids=["one_class", "flat", "no_image", "empty_class", "unknown_in_test", "unknown_in_validation", "split_twice"],
)
def test_what_cannot_be_used_is_named(tree, paths, message):
    with pytest.raises(InputError, match=message) as error:
        load_splits(data_dir=str(tree(*paths)))
    assert "\n" not in str(error.value)


def test_the_path_must_be_a_folder(tree, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_splits(data_dir=str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match="is a file, neither a folder nor a zip"):
        load_splits(data_dir=str(tree("a/1.jpg") / "a" / "1.jpg"))


@pytest.mark.skipif(os.name == "nt", reason="file names are UTF-16 there")
def test_a_file_name_that_is_not_utf8_is_named(tree):
    root = tree("a/1.jpg", "b/1.jpg")
    with open(os.path.join(os.fsencode(root), b"a", b"\xff.jpg"), "wb"):
        pass
    with pytest.raises(InputError, match="not UTF-8"):
        read(root)


@pytest.mark.skipif(os.name == "nt", reason="such names can't be there")
@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J\x1b[H", "x\u202egpj"])
def test_names_are_told_escaped(tree, name):
    root = tree(f"{name}/1.jpg", f"{name}/2.jpg", "b/1.jpg", "b/2.jpg")
    said = load_splits(data_dir=str(root)).describe()
    assert all(line.isprintable() for line in said.splitlines())
    assert len(said.splitlines()) == 3
    assert said.count(printable(name)) == 2
    with pytest.raises(InputError) as error:
        load_splits(data_dir=str(tree(f"{name}{name}/no.txt")))
    assert str(error.value).isprintable()


def write_zip(path: Path, members: dict[str, bytes | str], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("wrapping", ["", "photos/", "a/b/"])
def test_a_zip_is_its_folder(tmp_path, monkeypatch, wrapping):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    names = [
        "train/10/3.txt",
        "train/10/1.jpg",
        "train/10/2",
        "train/2, or/1.png",
        "train/2, or/2.heic",
        "test/10/é.jpg",
    ]
    junk = ["__MACOSX/train/10/._1.jpg", wrapping + "train/10/notes.txt", "../outside.jpg"]
    file = write_zip(tmp_path / "photos.zip", {wrapping + name: JPEG for name in names} | dict.fromkeys(junk, b""))
    first, second = (read(file) for _ in range(2))
    assert classes(first) == ["10", "2, or"]
    assert sizes(first) == {"train": 5, "test": 1}
    assert first.splits["train"]["image"] == second.splits["train"]["image"]
    assert not (tmp_path / "cache" / "outside.jpg").exists()


def test_zips_in_a_folder_without_images_are_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    for split, inside in (("train", "train/"), ("test", "")):
        write_zip(
            tmp_path / "data" / f"{split}.zip", {f"{inside}{name}/{i}.jpg": b"" for name in "ab" for i in range(3)}
        )
    assert sizes(read(tmp_path / "data")) == {"test": 6, "train": 6}
    # Beside images, a zip file is the one that they came in.
    for name in "ab":
        (tmp_path / "data" / name).mkdir()
        (tmp_path / "data" / name / "1.jpg").touch()
    assert sizes(read(tmp_path / "data")) == {"train": 2}


def test_a_zip_has_its_labels_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    members = {"set/metadata.csv": "file_name,label\n1.jpg,cat\n2.jpg,dog\n", "set/1.jpg": b"", "set/2.jpg": b""}
    assert classes(read(write_zip(tmp_path / "photos.zip", members))) == ["cat", "dog"]


@pytest.mark.parametrize(("encoding", "says_so"), [("utf-8", True), ("utf-8", False), ("cp437", False)])
@pytest.mark.parametrize("labels", ["folders", "metadata"])
def test_the_names_in_a_zip_are_read_as_they_were_written(tmp_path, monkeypatch, encoding, says_so, labels):
    """macOS does not say that it writes UTF-8, and Windows writes CP437."""
    monkeypatch.setattr(archives, "cache_folder", lambda: tmp_path / "cache")
    members = {f"{name}/{name}{i}.jpg": JPEG for name in ("café", "thé") for i in range(2)}
    if labels == "metadata":
        text = "file_name,label\n" + "".join(f"{name},{name[:3]}\n" for name in members)
        members |= {"metadata.csv": text.encode()}
    with monkeypatch.context() as context:
        if not says_so:
            context.setattr(zipfile.ZipInfo, "_encodeFilenameFlags", lambda self: (self.filename.encode(encoding), 0))
        file = write_zip(tmp_path / "photos.zip", members)
    assert classes(read(file)) == (["café", "thé"] if labels == "folders" else ["caf", "thé"])


def test_a_zip_that_cannot_be_unpacked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_zip(tmp_path / "broken.zip", {"a/1.jpg": b"0" * 1000})
    data = (tmp_path / "broken.zip").read_bytes()
    (tmp_path / "broken.zip").write_bytes(data.replace(b"0" * 1000, b"1" * 1000))
    with pytest.raises(InputError, match=r"broken\.zip` cannot be unpacked: Bad CRC-32"):
        read(tmp_path / "broken.zip")
    assert not list((tmp_path / "cache" / "entame_hf").iterdir())


@pytest.mark.parametrize("count", [1, 40], ids=["one_file", "many_files"])
def test_a_zip_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch, count):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(archives, "_SMALL", 10**6)
    members = {f"{name}/{i}.bmp": bytes(4_000_000 // count) for name in "ab" for i in range(count)}
    file = write_zip(tmp_path / "bomb.zip", members, zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match=r"unpacks to 0\.0 GB.*If you trust it, give `max_unzipped_gb=1`"):
        read(file)
    assert not list((tmp_path / "cache" / "entame_hf").iterdir())
    assert open_folder(file, max_unzipped_gb=1).count == 2 * count
    with pytest.raises(InputError, match="max_unzipped_gb"):
        open_folder(write_zip(tmp_path / "b.zip", members, zipfile.ZIP_DEFLATED), max_unzipped_gb=0.001)


def test_a_zip_of_photos_may_be_large(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(archives, "_SMALL", 10**4)
    noise = {f"{name}/{i}.jpg": os.urandom(50_000) for name in "ab" for i in range(2)}
    assert open_folder(write_zip(tmp_path / "photos.zip", noise, zipfile.ZIP_DEFLATED)).count == 4
    monkeypatch.setattr(archives, "_LIMIT", 10**5)
    with pytest.raises(InputError, match="max_unzipped_gb"):
        open_folder(write_zip(tmp_path / "other.zip", noise))


def unpacked(path: Path, text: str) -> str:
    """Write a zip of two images; return where it is unpacked."""
    return open_folder(write_zip(path, {"a/1.jpg": text, "b/1.jpg": text})).path


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
    first = unpacked(tmp_path / "photos.zip", "1")
    other = unpacked(tmp_path / "other.zip", "1")
    assert open_folder(tmp_path / "photos.zip").count
    second = unpacked(tmp_path / "photos.zip", "22")
    # The first is in use, by this process.
    assert all(os.path.isdir(folder) for folder in (first, second, other))
    leave()
    third = unpacked(tmp_path / "photos.zip", "333")
    assert not any(os.path.exists(folder) for folder in (first, second))
    assert sorted(os.listdir(tmp_path / "cache" / "entame_hf")) == sorted(map(os.path.basename, (third, other)))


@pytest.mark.skipif(os.name == "nt", reason="nothing can be locked there")
def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch, leave):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "cache" / "entame_hf"
    (folder / "tmpleft" / "a").mkdir(parents=True)
    (folder / "tmpbusy").mkdir()
    archives._use(folder / "tmpbusy")
    found = unpacked(tmp_path / "photos.zip", "1")
    assert sorted(os.listdir(folder)) == ["tmpbusy", os.path.basename(found)]
