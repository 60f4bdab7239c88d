"""Each layout that docs/data.md lists is read as it says there."""

import shutil
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image

from entame_hf.data import Splits, load_splits, split_dataset

DOCUMENT = Path(__file__).parents[2] / "docs" / "data.md"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def images(root: Path, folders: str, count: int = 4) -> Path:
    for folder in folders.split():
        (root / folder).mkdir(parents=True)
        for i in range(count):
            (root / folder / f"{i}.jpg").touch()
    return root


def rows(count: int) -> Dataset:
    values = {"image": [{"bytes": b"", "path": None}] * count, "label": [i % 2 for i in range(count)]}
    features = Features({"image": Image(decode=False), "label": ClassLabel(names=["CLASS", "other"])})
    return Dataset.from_dict(values, features=features)


def folder(root: Path, folders: str) -> Splits:
    return load_splits(data_dir=str(images(root, folders)))


def metadata(root: Path, columns: str = "label") -> Splits:
    images(root, "all", 12)
    values = [f"all/{i}.jpg,{('CLASS', 'other')[i % 2]},{('train', 'val', 'test')[i // 4]}" for i in range(12)]
    count = 2 + columns.count(",")
    lines = [f"file_name,{columns}", *(",".join(value.split(",")[:count]) for value in values)]
    (root / "metadata.csv").write_text("\n".join(lines))
    return load_splits(data_dir=str(root))


def parquet(root: Path) -> Splits:
    for name in ("train-0", "train-1", "val-0", "test-0"):
        rows(4).to_parquet(root / f"{name}.parquet")
    return load_splits(data_dir=str(root))


def zipped(root: Path) -> Splits:
    images(root / "photos", "train/CLASS train/other test/CLASS test/other")
    return load_splits(data_dir=shutil.make_archive(str(root / "photos"), "zip", root / "photos"))


def zips(root: Path) -> Splits:
    for split in ("train", "test"):
        shutil.make_archive(str(root / split), "zip", images(root / f"{split}-files", "CLASS other"))
        shutil.rmtree(root / f"{split}-files")
    return load_splits(data_dir=str(root))


def saved(root: Path) -> Splits:
    DatasetDict(train=rows(8), val=rows(4)).save_to_disk(root)
    return load_splits(data_dir=str(root))


# The first cell of each row without its markup: how to build it, and the images of each split.
LAYOUTS = {
    "DATA_DIR/CLASS/*": (lambda root: folder(root, "CLASS other"), (6, 2, None)),
    "DATA_DIR/train/CLASS/*, val/CLASS/*, test/CLASS/*": (
        lambda root: folder(root, "train/CLASS train/other val/CLASS val/other test/CLASS test/other"),
        (8, 8, 8),
    ),
    "DATA_DIR/seg_train/seg_train/CLASS/*, seg_test/seg_test/CLASS/*, seg_pred/seg_pred/*": (
        lambda root: folder(
            root,
            "seg_train/seg_train/CLASS seg_train/seg_train/other seg_test/seg_test/CLASS seg_test/seg_test/other "
            "seg_pred/seg_pred",
        ),
        (6, 2, 8),
    ),
    "DATA_DIR/train/CLASS/* beside validation_matched/CLASS/*": (
        lambda root: folder(root, "train/CLASS train/other validation_matched/CLASS validation_matched/other"),
        (8, 8, None),
    ),
    "DATA_DIR/CLASS/train/*, CLASS/test/*": (
        lambda root: folder(root, "CLASS/train CLASS/test other/train other/test"),
        (6, 2, 8),
    ),
    "DATA_DIR/photos/CLASS/*": (lambda root: folder(root, "photos/CLASS photos/other"), (6, 2, None)),
    "DATA_DIR/train/CLASS/* beside test1/* or unlabeled/*": (
        lambda root: folder(root, "train/CLASS train/other test1 unlabeled"),
        (6, 2, None),
    ),
    "DATA_DIR/* and metadata.csv, metadata.jsonl or metadata.parquet": (metadata, (10, 2, None)),
    'DATA_DIR/metadata.csv with a column "split"': (lambda root: metadata(root, "label,split"), (4, 4, 4)),
    "DATA_DIR/train.zip, test.zip, and no images beside them": (zips, (6, 2, 8)),
    "DATA_DIR/train-*.parquet, val-*.parquet, test-*.parquet": (parquet, (8, 4, 4)),
    "a folder of save_to_disk": (saved, (8, 4, None)),
    "a zip file of any of these folders of images": (zipped, (6, 2, 8)),
    # As Parquet and folders: test_tables.py has a repository of each kind.
    "an id on the Hub": (parquet, (8, 4, 4)),
    "a datasets.DatasetDict in Python: split_dataset(loaded)": (
        lambda root: split_dataset(DatasetDict(train=rows(8), test=rows(4))),
        (6, 2, 4),
    ),
}


def test_every_documented_layout_is_tried():
    table = DOCUMENT.read_text(encoding="utf-8").split("## Which layouts are read")[1].split("##")[0]
    cells = [line.split("|")[1].strip().replace("`", "") for line in table.splitlines() if line.startswith("|")]
    assert cells[2:] == list(LAYOUTS)


@pytest.mark.parametrize(("build", "sizes"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_documented_layout_is_read(tmp_path, build, sizes):
    (tmp_path / "data").mkdir()
    splits = build(tmp_path / "data")
    assert tuple(part and len(part) for part in (splits.train, splits.validation, splits.test)) == sizes
    assert splits.class_names == ["CLASS", "other"]
