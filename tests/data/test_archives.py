"""A zip file is read as the folder that it holds."""

import io
import zipfile
from pathlib import Path

import datasets
import pytest
from PIL import Image

from entame_hf.data import load_splits
from entame_hf.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:Duplicate name")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def image(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value % 256, 0, 0)).save(file, "PNG")
    return file.getvalue()


def archive(path: Path, files: dict[str, bytes | str]) -> str:
    with zipfile.ZipFile(path, "w") as opened:
        for name, data in files.items():
            opened.writestr(name, data)
    return str(path)


def unpacked(path: str) -> str:
    folder = Path(path).with_suffix("")
    zipfile.ZipFile(path).extractall(folder)
    return str(folder)


def parts(names: str) -> dict[str, bytes | str]:
    return {f"{name}/{i}.png": image(i) for i, name in enumerate(names.split() * 8)}


PARTS = "part_1 part_2"
LABELS = "filename,label\n" + "".join(f"{Path(name).name},{'ab'[i // 2 % 2]}\n" for i, name in enumerate(parts(PARTS)))


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "HAM_metadata.csv"])
def test_a_table_beside_parts_is_found_in_both(tmp_path, name):
    text = LABELS.replace(",", "\t") if name.endswith("tsv") else LABELS
    path = archive(tmp_path / "parts.zip", parts(PARTS) | {name: text})
    for root in (unpacked(path), path):
        with pytest.raises(InputError, match=f"{name} names these images"):
            load_splits(data_dir=root)


def test_tables_of_images_are_read(tmp_path):
    rows = {"image": [{"bytes": image(i), "path": None} for i in range(8)], "label": [i % 2 for i in range(8)]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    files = {}
    for split in ("train", "test"):
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "one.parquet")
        files[f"{split}-00000-of-00001.parquet"] = (tmp_path / "one.parquet").read_bytes()
    splits = load_splits(data_dir=archive(tmp_path / "tables.zip", files))
    assert (splits.class_names, len(splits.test)) == (["a", "b"], 8)


def test_zip_files_of_splits_are_unpacked_too(tmp_path):
    inside = {
        f"{split}.zip": Path(archive(tmp_path / f"{split}.zip", parts("cat dog"))).read_bytes()
        for split in ("train", "test")
    }
    splits = load_splits(data_dir=archive(tmp_path / "kaggle.zip", inside))
    assert (splits.class_names, len(splits.test)) == (["cat", "dog"], 16)


def test_two_files_of_one_name_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as opened:
        for first in (0, 100):
            for name in ("cat", "dog"):
                for i in range(4):
                    opened.writestr(f"{name}/{i}.png", image(first + i))
    with pytest.raises(InputError, match=r"holds two different files cat/0\.png\. Unpack it yourself"):
        load_splits(data_dir=str(tmp_path / "twice.zip"))


@pytest.mark.parametrize("spelling", ["{0}", "./{0}", "/{0}", "../{0}"])
def test_the_same_file_twice_is_one(tmp_path, spelling):
    files = parts("cat dog")
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as opened:
        for name, data in [*files.items(), *((spelling.format(name), data) for name, data in files.items())]:
            opened.writestr(name, data)
    splits = load_splits(data_dir=str(tmp_path / "twice.zip"))
    assert len(splits.train) + len(splits.validation) == 16


def test_backslashes_separate_folders(tmp_path):
    files = {name.replace("/", "\\"): data for name, data in parts("cat dog").items()}
    assert load_splits(data_dir=archive(tmp_path / "windows.zip", files)).class_names == ["cat", "dog"]


def test_files_of_systems_stay_inside(tmp_path):
    files = parts("cat dog") | {"__MACOSX/cat/._0.png": image(0), "cat/.DS_Store": "x", ".hidden/a.png": image(0)}
    splits = load_splits(data_dir=archive(tmp_path / "mac.zip", files))
    assert splits.class_names == ["cat", "dog"]
    assert len(splits.train) + len(splits.validation) == 16


@pytest.mark.parametrize("name", ["annotations/a.xml", "code/train.py", "docs/readme", "Meta/a.txt"])
def test_a_folder_beside_the_images_is_no_class(tmp_path, name):
    path = archive(tmp_path / "photos.zip", parts("cat dog") | {name: "text"})
    for root in (unpacked(path), path):
        splits = load_splits(data_dir=root)
        assert splits.class_names == ["cat", "dog"]
        assert "1 file of other types ignored" in splits.describe()


def test_a_class_without_images_is_refused(tmp_path):
    path = archive(tmp_path / "photos.zip", parts("cat dog") | {"bird/notes.txt": "text"})
    for root in (unpacked(path), path):
        with pytest.raises(InputError, match=r"Class folder 'bird' .*has no image to train on"):
            load_splits(data_dir=root)


@pytest.mark.parametrize("name", ["labels.h5", "weights.pth", "video.mp4"])
def test_what_is_never_read_takes_no_room(tmp_path, name):
    path = archive(tmp_path / "photos.zip", parts("cat dog") | {name: "x"})
    load_splits(data_dir=path)
    assert not [*tmp_path.glob(f"cache/**/{name}")]


def test_two_texts_of_one_name_are_no_matter(tmp_path):
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as opened:
        for name, data in [*parts("cat dog").items(), ("readme.txt", "a"), ("readme.txt", "b")]:
            opened.writestr(name, data)
    assert load_splits(data_dir=str(tmp_path / "twice.zip")).class_names == ["cat", "dog"]


def test_folders_of_windows_have_entries_of_their_own(tmp_path):
    files = {"cat\\": b"", "dog\\": b""} | {name.replace("/", "\\"): data for name, data in parts("cat dog").items()}
    assert load_splits(data_dir=archive(tmp_path / "windows.zip", files)).class_names == ["cat", "dog"]
