"""What lies in files of its own is noticed when it changes, and what lies in the dataset is not asked for."""

import os
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Image

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
