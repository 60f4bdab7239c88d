"""Labels of Parquet files and streams are matched by the names that each file has for them."""

from pathlib import Path

import datasets
import pyarrow.dataset
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, IterableDatasetDict, Value
from pyarrow.dataset import ParquetFileFormat

from entame_hf.data import Splits, load_splits, split_dataset, tables
from entame_hf.data.columns import image_names
from entame_hf.errors import InputError

CAT_DOG, DOG_CAT = ClassLabel(names=["cat", "dog"]), ClassLabel(names=["dog", "cat"])


def write(path: Path, names: list[str], feature: object, start: int = 0, **more) -> None:
    """Write a Parquet file of rows whose image's bytes are the name of its class."""
    path.parent.mkdir(parents=True, exist_ok=True)
    label = [feature.str2int(name) for name in names] if isinstance(feature, ClassLabel) else names
    columns = {"image": [{"bytes": b"%s %d" % (n.encode(), start + i), "path": None} for i, n in enumerate(names)]}
    Dataset.from_dict(
        {**columns, "label": label, "id": list(range(len(names)))},
        features=Features({"image": Image(), "label": feature, "id": Value("int64")}),
    ).to_parquet(path)


def told(splits: Splits) -> list[tuple[str, str]]:
    """Give the name that the image has and the one that its label says, for all images."""
    parts = [part for part in (splits.train, splits.validation, splits.test) if part is not None]
    return [
        (row["image"]["bytes"].decode().split()[0], splits.class_names[row["label"]]) for part in parts for row in part
    ]


NAMES = ["cat", "dog", "dog", "cat", "cat", "dog"]


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize(
    "files",
    [
        {"train-0": CAT_DOG, "validation-0": DOG_CAT},
        {"train-0": DOG_CAT, "validation-0": CAT_DOG, "test-0": DOG_CAT},
        {"train-00000-of-00002": CAT_DOG, "train-00001-of-00002": DOG_CAT, "validation-0": CAT_DOG},
        {"train-0": CAT_DOG, "train-1": CAT_DOG, "train-2": DOG_CAT, "train-3": CAT_DOG, "validation-0": DOG_CAT},
        {"train-0": ClassLabel(names=["cat", "cow", "dog"]), "validation-0": DOG_CAT},
    ],
    ids=["splits", "three_splits", "files_of_a_split", "one_of_many_files", "fewer_classes"],
)
def test_labels_are_matched_by_the_names_of_each_file(tmp_path, files, streaming):
    for name, feature in files.items():
        write(tmp_path / f"{name}.parquet", NAMES, feature, 100 * len(name))
    splits = load_splits(dataset_name=str(tmp_path), streaming=streaming)
    pairs = told(splits)
    assert len(pairs) == len(NAMES) * len(files)
    assert all(image == label for image, label in pairs)


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ClassLabel(names=["cat", "dog", "owl"]), "'owl'"),
        (ClassLabel(names=["Cat", "Dog", "Cow"]), r"'Cat'.*looks like 'cat'"),
        (Value("int64"), "holds numbers without names"),
    ],
    ids=["another_class", "other_names", "no_names"],
)
def test_names_that_do_not_match_are_refused(tmp_path, other, message, streaming):
    write(tmp_path / "train-0.parquet", NAMES, CAT_DOG)
    own = other.names if isinstance(other, ClassLabel) else [0, 1]
    write(tmp_path / "train-1.parquet", [str(n) for n in own], other) if isinstance(other, ClassLabel) else (
        Dataset.from_dict(
            {"image": [{"bytes": b"x", "path": None}] * 2, "label": own, "id": [0, 1]},
            features=Features({"image": Image(), "label": other, "id": Value("int64")}),
        ).to_parquet(tmp_path / "train-1.parquet")
    )
    write(tmp_path / "validation-0.parquet", NAMES, CAT_DOG)
    with pytest.raises(InputError, match=message):
        load_splits(dataset_name=str(tmp_path), streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
def test_splits_in_memory_are_matched_by_name(tmp_path, streaming):
    parts = {}
    for name, feature in (("train", CAT_DOG), ("validation", DOG_CAT)):
        write(tmp_path / f"{name}.parquet", NAMES, feature)
        parts[name] = Dataset.from_parquet(str(tmp_path / f"{name}.parquet"), cache_dir=str(tmp_path / name))
    loaded = DatasetDict(parts)
    if streaming:
        loaded = IterableDatasetDict({name: part.to_iterable_dataset() for name, part in parts.items()})
    assert all(image == label for image, label in told(split_dataset(loaded)))


def test_a_saved_dataset_is_read(tmp_path):
    write(tmp_path / "train.parquet", NAMES * 2, CAT_DOG)
    rows = Dataset.from_parquet(str(tmp_path / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    rows.save_to_disk(tmp_path / "one")
    DatasetDict(train=rows, val=rows).save_to_disk(tmp_path / "two")
    one, two = (load_splits(dataset_name=str(tmp_path / name)) for name in ("one", "two"))
    assert (len(one.train) + len(one.validation), len(two.train), len(two.validation)) == (12, 12, 12)
    assert all(image == label for image, label in told(one) + told(two))


@pytest.mark.parametrize("parameter", ["data_dir", "dataset_name"])
def test_folders_of_parquet_and_of_images_are_told_apart(tmp_path, parameter):
    write(tmp_path / "parquet" / "data" / "train-0.parquet", NAMES * 2, CAT_DOG)
    (tmp_path / "parquet" / "README.md").write_text("# Cats and dogs")
    for name in ("cat", "dog"):
        for i in range(4):
            (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "images" / name / f"{i}.jpg").touch()
    for folder in ("parquet", "images"):
        assert load_splits(**{parameter: str(tmp_path / folder)}).class_names == ["cat", "dog"]


def test_the_splits_of_parquet_have_relatives_too(tmp_path):
    for name in ("train", "dev", "testing"):
        write(tmp_path / name / "0.parquet", NAMES, CAT_DOG)
    splits = load_splits(dataset_name=str(tmp_path))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (6, 6, 6)


SPLITS = {
    "eval_is_validation": ("train eval test", (6, 6, 6), []),
    "relatives": ("training tst held-out", (6, 6, 6), []),
    "prefixed": ("pets_train-00000-of-00001 pets_valid-00000-of-00001", (6, 6, None), []),
    "hashed_shards": ("train-00000-of-00001-a09b74b3ef9c3b56 val-00000-of-00001-b4", (6, 6, None), []),
    "in_folders": ("data/train/part data/dev/part", (6, 6, None), []),
    "left_out": ("train val notes", (6, 6, None), ["1 file of tables left out: its name is no split's"]),
}


@pytest.mark.parametrize("streaming", [False, True], ids=["table", "stream"])
@pytest.mark.parametrize(("names", "sizes", "notes"), SPLITS.values(), ids=SPLITS)
def test_one_table_of_names_holds_for_files(tmp_path, names, sizes, notes, streaming):
    for name in names.split():
        write(tmp_path / "data" / f"{name}.parquet", NAMES, CAT_DOG)
    splits = load_splits(dataset_name=str(tmp_path / "data"), streaming=streaming)
    assert tuple(part and len(list(part)) for part in (splits.train, splits.validation, splits.test)) == sizes
    assert all(note in splits.describe() for note in notes)
    assert [skipped.image.rsplit("/", 1)[1] for skipped in splits.skipped] == ["notes.parquet"] * len(notes)


def test_a_card_that_lists_the_files_of_splits_is_followed(tmp_path):
    for name in ("eval", "a", "b"):
        write(tmp_path / f"{name}.parquet", NAMES, CAT_DOG)
    files = "".join(
        f"  - {{split: {split}, path: {name}.parquet}}\n" for split, name in (("train", "a"), ("test", "eval"))
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    splits = load_splits(dataset_name=str(tmp_path))
    assert len(splits.train) + len(splits.validation) == len(splits.test) == 6


def table_with(column, values, feature, label=CAT_DOG):
    images = [{"bytes": b"%d" % i, "path": None} for i in range(12)]
    features = Features({"image": Image(decode=False), "label": label, column: feature})
    return Dataset.from_dict({"image": images, "label": [0, 1] * 6, column: values * 3}, features=features)


@pytest.mark.parametrize(
    ("column", "values", "feature"),
    [
        ("split", ["train", "train", "test", "dev"], Value("string")),
        ("Split", ["train", "train", "test", "dev"], Value("string")),
        ("subset", ["Training", "Training", "Test", "Validation"], Value("large_string")),
        ("split", [2, 2, 0, 1], ClassLabel(names=["test", "val", "train"])),
        ("part", [2, 2, 0, 1], ClassLabel(names=["test", "val", "train"])),
    ],
)
def test_a_column_names_the_splits_of_a_table(column, values, feature):
    splits = split_dataset(table_with(column, values, feature, Value("int64")))
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [6, 3, 3]
    assert splits.class_names == ["0", "1"]
    assert [image["bytes"] for image in splits.test["image"]] == [b"2", b"6", b"10"]


@pytest.mark.parametrize(
    ("column", "values", "feature", "options", "sizes"),
    [
        ("split", ["train", "train", "val", None], Value("string"), {"eval_split": "val"}, (6, 3)),
        (
            "split",
            ["train"] * 2 + ["val", "b"],
            Value("string"),
            {"train_split": "train", "eval_split": "val"},
            (6, 3),
        ),
        ("Split", [1, 0, 0, 2], Value("int8"), {"train_split": "0", "eval_split": "1"}, (6, 3)),
        ("split", [0, 0, 1, 2], Value("int8"), {"train_split": "train"}, (10, 2)),
        (
            "is_valid",
            [True, False] + [False] * 2,
            Value("bool"),
            {"train_split": "False", "eval_split": "True"},
            (9, 3),
        ),
        ("is_test", [1, 0, 0, 0], Value("int64"), {"train_split": "0", "eval_split": "1"}, (9, 3)),
    ],
)
def test_a_column_that_names_other_splits_is_refused_with_a_command(column, values, feature, options, sizes):
    table = table_with(column, values, feature)
    train = options["train_split"] if "eval_split" in options and "train_split" in options else ""
    with pytest.raises(InputError, match=f"Column '{column}' holds .* no split is called .*`train_split={train}"):
        split_dataset(table)
    splits = split_dataset(table, **options)
    assert (len(splits.train), len(splits.validation)) == sizes


@pytest.mark.parametrize(
    ("column", "values"), [("label", ["train", "test"]), ("kind", ["train", "test"]), ("day", ["monday", "train"])]
)
def test_a_column_of_labels_or_other_names_is_no_split(column, values):
    images = [{"bytes": b"%d" % i, "path": None} for i in range(20)]
    table = Dataset.from_dict({"image": images, column: values * 10}).cast_column("image", Image(decode=False))
    splits = split_dataset(table, label_column_name=column)
    assert (len(splits.train), splits.class_names) == (16, sorted(values))


def test_a_label_beside_another_class_label_is_ambiguous():
    table = table_with("source", [0, 1, 1, 0], ClassLabel(names=["web", "camera"]), Value("int64"))
    with pytest.raises(InputError, match=r"label: label, source.*`label_column_name=label`"):
        split_dataset(table)
    assert split_dataset(table, label_column_name="label").class_names == ["0", "1"]
    # Of splits that lie apart, a column "split" is no label.
    kinds = {
        name: table_with("split", [value] * 4, ClassLabel(names=["val", "train"]), Value("int64"))
        for name, value in (("train", 1), ("val", 0))
    }
    assert split_dataset(kinds).class_names == ["0", "1"]


@pytest.mark.parametrize("second", [CAT_DOG, DOG_CAT])
def test_a_stream_of_files_on_the_disk_never_holds_a_row_group(second, tmp_path, monkeypatch):
    """A row group may hold 100 MB, and a shuffled stream reads ten at a time."""
    for split in ("train", "validation"):
        for number, labels in enumerate((CAT_DOG, second)):
            write(tmp_path / f"{split}-{number}.parquet", ["cat", "dog"] * 10, labels)
    ways = []

    def file_format(default_fragment_scan_options):
        ways.append(default_fragment_scan_options)
        return ParquetFileFormat(default_fragment_scan_options=default_fragment_scan_options)

    monkeypatch.setattr(pyarrow.dataset, "ParquetFileFormat", file_format)
    splits = load_splits(dataset_name=str(tmp_path), streaming=True)
    assert len(list(splits.train)) == 40
    assert ways
    assert all(way.use_buffered_stream and not way.pre_buffer for way in ways)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Stand for a repository of image files on the Hub: labels in metadata.csv, one row and one file too many."""
    root = tmp_path / "repository"
    for split in ("train", "eval"):
        (root / split / "images").mkdir(parents=True)
        for i in range(6):
            (root / split / "images" / f"{i}.jpg").touch()
        rows = "".join(f"images/{i}.jpg,{NAMES[i % 2]}\n" for i in (0, 1, 2, 3, 4, 6))
        (root / split / "metadata.csv").write_text(f"file_name,label\n{rows}")
    builder = datasets.load_dataset_builder(str(root))
    files = builder.config.data_files
    prefix = "hf://datasets/pets/photos@0123abc/"
    for split, paths in files.items():
        files[split] = [path.replace(f"{root}/", prefix) for path in paths]
    downloads = []

    def download(name, **options):
        downloads.append((name, options["revision"]))
        return str(root)

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder)
    monkeypatch.setattr(tables, "snapshot_download", download)
    module = tables.dataset_module_factory(str(root))
    monkeypatch.setattr(tables, "dataset_module_factory", lambda _: module)
    return downloads


def test_image_files_of_the_hub_are_read_as_a_folder(repository):
    splits = load_splits(dataset_name="pets/photos")
    assert repository == [("pets/photos", "0123abc")]
    said = splits.describe().splitlines()
    assert said[0] == "Splits: train 5 (train), validation 5 (eval); read as metadata.csv beside images."
    assert "Note: 2 rows of metadata without a file left out." in said
    assert sorted(image.rsplit("/", 1)[1] for image, *_ in splits.skipped) == ["5.jpg"] * 2 + ["6.jpg"] * 2
    with pytest.raises(InputError, match=r"`streaming`: pets/photos holds files of images.*Leave `streaming` out"):
        load_splits(dataset_name="pets/photos", streaming=True)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"streaming": True}, "`streaming`: .* holds files of images, and only tables are streamed"),
        ({"dataset_config_name": "default"}, "`dataset_config_name=default`: .* is a folder of images, which has no"),
    ],
)
def test_what_a_folder_of_images_does_not_have_is_refused(tmp_path, option, message):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").touch()
    with pytest.raises(InputError, match=message):
        load_splits(dataset_name=str(tmp_path), **option)


def counted_from_one(names: str) -> Dataset:
    """Labels from 1 to 3: `datasets` casts them to three names and does not look."""
    table = Dataset.from_dict(
        {"image": [{"bytes": b"%d" % i, "path": None} for i in range(12)], "label": [1, 2, 3] * 4}
    )
    return table.cast_column("image", Image(decode=False)).cast_column("label", ClassLabel(names=names.split()))


@pytest.mark.parametrize("where", ["train", "val", "val of another order", "parquet", "stream"])
def test_labels_that_are_counted_from_one_are_refused(where, tmp_path):
    good = counted_from_one("a b c d")
    wrong = counted_from_one("b a c" if "order" in where else "a b c")
    parts = {"train": wrong} if where == "train" else {"train": good, "val": wrong}

    def read():
        if where == "parquet":
            for name, part in parts.items():
                part.to_parquet(tmp_path / f"{name}.parquet")
            return load_splits(dataset_name=str(tmp_path))
        if where == "stream":
            return list(split_dataset({name: part.to_iterable_dataset() for name, part in parts.items()}).validation)
        return split_dataset(parts)

    with pytest.raises(InputError, match=r"has the label 3, and its 3 classes \(.*\) are counted from 0"):
        read()


def test_a_test_split_without_labels_has_none_in_another_order_either(tmp_path):
    for name, names, label in (("train", ["cat", "dog"], [0, 1]), ("test", ["dog", "cat"], [-1, -1])):
        values = {"image": [{"bytes": b"%d" % i, "path": None} for i in range(12)], "label": label * 6}
        features = Features({"image": Image(decode=False), "label": ClassLabel(names=names)})
        Dataset.from_dict(values, features=features).to_parquet(tmp_path / f"{name}.parquet")
    splits = load_splits(dataset_name=str(tmp_path))
    assert splits.test is None
    assert "12 images of split 'test' left out: no labels" in splits.describe()


@pytest.mark.parametrize(
    "labels", [["cat", "dog", "dog", "cat"], [[1, 0], [0, 1], [0, 1], [1, 0]]], ids=["text", "shares"]
)
def test_images_of_chosen_rows_are_not_copied(labels, monkeypatch):
    monkeypatch.setattr(Dataset, "flatten_indices", lambda *_, **__: pytest.fail("copies the images"))
    images = [{"bytes": b"%d" % i, "path": None} for i in range(12)]
    columns = {"image": images, "label": labels * 3, "split": ["train", "val", "train"] * 4}
    splits = split_dataset(Dataset.from_dict(columns).cast_column("image", Image(decode=False)))
    assert [image["bytes"] for image in splits.validation["image"]] == [b"1", b"4", b"7", b"10"]
    assert splits.validation["label"][:] == [1, 0, 0, 1]
    assert splits.train["label"][:] == [0, 1, 0, 1, 1, 0, 1, 0]
    assert image_names(splits.validation, "image") == ["row 1", "row 4", "row 7", "row 10"]


def test_a_table_that_git_left_to_lfs_is_named(tmp_path):
    write(tmp_path / "train-0.parquet", ["cat", "dog"] * 10, CAT_DOG)
    pointer = tmp_path / "train-1.parquet"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(InputError, match=rf"{pointer} is a Git LFS pointer instead of the table: run git lfs pull"):
        load_splits(dataset_name=str(tmp_path))
