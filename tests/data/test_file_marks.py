"""What lies in files of its own is noticed when it changes, and what lies in the dataset is not asked for."""

import os
from io import BytesIO
from pathlib import Path

import PIL.Image
import pytest
from datasets import ClassLabel, Dataset, Features, Image, load_from_disk
from transformers import ViTImageProcessor

from entame_hf.data import ClassificationDataset, Preparation
from entame_hf.data.cache import file_marks


def table(images: list[dict | None]) -> Dataset:
    features = Features({"image": Image(decode=False), "label": ClassLabel(names=["a", "b"])})
    return Dataset.from_dict({"image": images, "label": [0] * len(images)}, features=features)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{i}.jpg" for i in range(4)]
    for path in paths:
        path.write_bytes(b"one")
    return [str(path) for path in paths]


@pytest.mark.parametrize(
    "first", [None, {"bytes": b"x", "path": None}, {"bytes": b"x", "path": "x.jpg"}], ids=["none", "bytes", "both"]
)
@pytest.mark.parametrize("order", [None, [4, 0, 2]], ids=["all", "chosen"])
def test_any_file_that_changes_is_noticed(files, first, order):
    data = table([first, *({"bytes": None, "path": path} for path in files)])
    data = data if order is None else data.select(order)
    before = file_marks(data, "image")
    assert before == file_marks(data, "image")
    Path(files[3]).write_bytes(b"another")
    after = file_marks(data, "image")
    assert after != before
    os.remove(files[1])
    assert file_marks(data, "image") != after


def test_only_files_of_chosen_rows_count(files):
    data = table([{"bytes": None, "path": path} for path in files]).select([2, 1])
    before = file_marks(data, "image")
    Path(files[0]).write_bytes(b"another")
    assert file_marks(data, "image") == before


@pytest.mark.parametrize("order", [range(3), [2, 0]], ids=["all", "chosen"])
def test_images_in_the_dataset_have_no_marks(order):
    data = table([{"bytes": b"x", "path": f"{i}.jpg"} for i in range(3)])
    assert file_marks(data.select(order), "image") == []
    assert file_marks(data.select([]), "image") == []


@pytest.mark.parametrize("rows", ["all", "chosen", "saved"])
def test_a_generator_that_gives_other_images_is_noticed(tmp_path, rows):
    """The dataset's fingerprint is the generator's, and not its images'."""
    level = tmp_path / "level.txt"

    def images():
        for label in (0, 1, 0):
            file = BytesIO()
            PIL.Image.new("L", (8, 8), int(level.read_text())).save(file, "PNG")
            yield {"image": {"bytes": file.getvalue(), "path": None}, "label": label}

    preparation = Preparation(ViTImageProcessor(size={"height": 8, "width": 8}))
    found = []
    for text in ("0", "255"):
        level.write_text(text)
        data = Dataset.from_generator(images, features=table([]).features, cache_dir=str(tmp_path / text))
        if rows == "chosen":
            data = data.select([2, 0])
        elif rows == "saved":
            data.save_to_disk(tmp_path / "saved")
            data = load_from_disk(tmp_path / "saved")
        found.append(float(ClassificationDataset(data, "image", "label", preparation)[0]["pixel_values"].mean()))
    assert found == pytest.approx([-1, 1], abs=1e-6)
