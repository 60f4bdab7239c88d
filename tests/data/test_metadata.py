"""Labels in metadata files are text as they stand; what doesn't match is refused or said with counts."""

import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from entame_hf.data import Splits, load_splits
from entame_hf.errors import InputError


@pytest.fixture
def folder(tmp_path: Path):
    """Write a metadata file beside (empty) images, by default one for each of its rows."""

    def make(rows: list[tuple[str, object]] | str, images: list[str] | None = None, name: str = "metadata.csv") -> str:
        text = rows if isinstance(rows, str) else "file_name,label\n" + "".join(f'"{f}","{la}"\n' for f, la in rows)
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        for image in images if images is not None else [image for image, _ in rows]:
            path = tmp_path / "data" / image
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return str(tmp_path / "data")

    return make


def labels(splits: Splits) -> dict[str, str]:
    """Give the class of each image by its file name."""
    parts = [part for part in (splits.train, splits.validation, splits.test) if part is not None]
    return {os.path.basename(row["image"]["path"]): splits.class_names[row["label"]] for part in parts for row in part}


def test_images_get_the_labels_of_their_rows(folder):
    rows = [(f"{i}.jpg", name) for i, name in enumerate(["cat", "dog", "cat", "dog"])]
    assert labels(load_splits(data_dir=folder(rows))) == dict(rows)


@pytest.mark.parametrize(
    "names", [["01", "1"], ["NA", "None"], ["1.0", "1"], ["true", "True"], ["1e3", "1000"], ["nan", "NaN"]]
)
def test_text_stays_text(folder, names):
    rows = [(f"{i}.jpg", names[i % 2]) for i in range(8)]
    splits = load_splits(data_dir=folder(rows))
    assert labels(splits) == dict(rows)
    assert Counter(splits.train["label"]) == {0: 3, 1: 3}


def test_names_that_look_the_same_are_refused(folder):
    with pytest.raises(InputError, match=r"'cat' \(.*'cat ' \(U\+0063 U\+0061 U\+0074 U\+0020\)"):
        load_splits(data_dir=folder([("1.jpg", "cat"), ("2.jpg", "cat "), ("3.jpg", "dog")]))


def test_an_image_with_two_labels_is_refused(folder):
    rows = [("1.jpg", "cat"), ("2.jpg", "dog"), ("./1.jpg", "dog")]
    with pytest.raises(InputError, match=r"1\.jpg has two labels: 'cat' in row 1 .* and 'dog' in row 3"):
        load_splits(data_dir=folder(rows))


def test_a_row_that_is_repeated_counts_once(folder):
    splits = load_splits(
        data_dir=folder([("1.jpg", "a"), ("2.jpg", "a"), ("3.jpg", "b"), ("4.jpg", "b"), ("1.jpg", "a")])
    )
    assert len(labels(splits)) == 4
    assert len(splits.train) + len(splits.validation) == 4
    assert "1 duplicate row of metadata ignored" in splits.describe()


def test_rows_without_file_and_files_without_row_are_said(folder):
    rows = [(f"{i}.jpg", "ab"[i % 2]) for i in range(8)] + [("lost.jpg", "a")]
    splits = load_splits(data_dir=folder(rows, [*(f"{i}.jpg" for i in range(8)), "extra.jpg", "more.heic"]))
    said = splits.describe()
    assert "9 rows of metadata and 10 images: 8 match." in said
    assert "1 row of metadata without a file left out" in said
    assert "2 images of " in said
    assert {os.path.basename(s.image): s.reason for s in splits.skipped} == {
        "lost.jpg": "row of metadata without a file",
        "extra.jpg": "no row of metadata",
        "more.heic": "no row of metadata",
    }


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (["x.jpg"], r"No row of .*metadata\.csv has a file, such as .*0\.jpg\. Paths are relative to the folder"),
        ([f"{i}.jpg" for i in range(0, 8, 2)], r"Class 'b' loses 4 of 4 images.* have no file, such as .*1\.jpg"),
        (["0.jpg", *(f"{i}.jpg" for i in range(1, 8, 2))], "Class 'a' loses 3 of 4 images"),
    ],
    ids=["all", "a_class", "most_of_a_class"],
)
def test_a_class_that_loses_its_images_stops_the_run(folder, images, message):
    with pytest.raises(InputError, match=message):
        load_splits(data_dir=folder([(f"{i}.jpg", "ab"[i % 2]) for i in range(8)], images))


@pytest.mark.parametrize("inside", ["images/", "a/b/"])
def test_paths_are_relative_to_the_file(folder, inside, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = [(f"{inside}{i}.jpg", "ab"[i % 2]) for i in range(4)]
    assert len(labels(load_splits(data_dir=folder(rows, name="metadata.csv")))) == 4
    rows = [(f"{i}.jpg", "ab"[i % 2]) for i in range(4)]
    images = [f"deep/er/{i}.jpg" for i in range(4)]
    (Path(folder(rows, images, name="deep/er/metadata.csv")) / "metadata.csv").unlink()
    assert len(labels(load_splits(data_dir=str(tmp_path / "data" / "deep")))) == 4


def test_paths_of_another_system_are_found(folder):
    rows = [(f"images\\{i}.jpg", "ab"[i % 2]) for i in range(4)]
    assert len(labels(load_splits(data_dir=folder(rows, [f"images/{i}.jpg" for i in range(4)])))) == 4


@pytest.mark.skipif(os.name != "posix", reason="some file systems normalise names")
def test_paths_and_labels_are_one_in_either_unicode_form(folder):
    rows = [("caf\u00e9.jpg", "cafe\u0301"), ("2.jpg", "caf\u00e9"), ("3.jpg", "tea"), ("4.jpg", "tea")]
    splits = load_splits(data_dir=folder(rows, ["cafe\u0301.jpg", "2.jpg", "3.jpg", "4.jpg"]))
    assert splits.class_names == ["caf\u00e9", "tea"]
    assert len(labels(splits)) == 4


def test_a_file_in_each_split_folder(folder):
    for split, count in (("train", 8), ("val", 4)):
        root = folder([(f"{i}.jpg", "ab"[i % 2]) for i in range(count)], [], name=f"{split}/metadata.csv")
        for i in range(count):
            (Path(root) / split / f"{i}.jpg").touch()
    (Path(root) / "test").mkdir()
    (Path(root) / "test" / "1.jpg").touch()
    splits = load_splits(data_dir=root)
    assert (len(splits.train), len(splits.validation), splits.test) == (8, 4, None)
    assert [os.path.relpath(s.image, root) for s in splits.skipped] == [os.path.join("test", "1.jpg")]


def test_a_file_at_the_top_of_split_folders(folder):
    rows = [(f"{split}/{i}.jpg", "ab"[i % 2]) for split in ("train", "valid", "test") for i in range(4)]
    splits = load_splits(data_dir=folder(rows))
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (4, 4, 4)


@pytest.mark.parametrize(
    ("values", "names"),
    [(["01", "1"], ["01", "1"]), ([2, 10], ["2", "10"]), ([True, False], ["False", "True"])],
    ids=["text", "integers", "booleans"],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_other_formats_keep_their_types(folder, values, names, suffix):
    rows = [{"file_name": f"{i}.jpg", "label": values[i % 2]} for i in range(8)]
    root = folder("\n".join(map(json.dumps, rows)), [f"{i}.jpg" for i in range(8)], f"metadata.{suffix}")
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), Path(root) / "metadata.parquet")
    splits = load_splits(data_dir=root)
    assert splits.class_names == names
    assert labels(splits) == {row["file_name"]: str(row["label"]) for row in rows}


def test_text_and_numbers_are_not_mixed(folder):
    rows = [{"file_name": "1.jpg", "label": 1}, {"file_name": "2.jpg", "label": "1"}]
    with pytest.raises(InputError, match=r"Labels are text in some rows .*numbers in others"):
        load_splits(data_dir=folder("\n".join(map(json.dumps, rows)), ["1.jpg", "2.jpg"], "metadata.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file_name,label\n1.jpg,\n2.jpg,b\n", "1 of 2 rows of .* have no label in column 'label': row 1"),
        ("file_name,label\n1.jpg\n2.jpg,b\n", "1 of 2 rows of .* have no label"),
        ("file_name,label\n1.jpg,a, tabby\n2.jpg,b\n", "Row 1 of .* has 3 values, and there are 2 columns.*Quote"),
        ("file_name,label\n2.jpg,b\na,b.jpg,c\n", "Row 2 of .* has 3 values"),
        ("file_name,label,label\n1.jpg,a,b\n", "has two columns 'label'. Rename one"),
        ("file_name,label\n,a\n2.jpg,b\n", "1 of 2 rows of .* have no image in column 'file_name': row 1"),
        ("path,label\n1.jpg,a\n", "has no column 'file_name'. Columns: path, label"),
        ("file_name,x,y\n1.jpg,a,b\n", "Several columns .*: x, y. Choose one: `label_column_name=x`"),
        ("file_name,cat,dog\n1.jpg,1,0\n2.jpg,0.0,1.0\n", "0 or 1 for each of cat, dog.*column called label"),
    ],
    ids=[
        "empty",
        "short",
        "comma_in_label",
        "comma_in_name",
        "two_columns",
        "no_image",
        "no_file_name",
        "several",
        "one_hot",
    ],
)
def test_what_cannot_be_used_is_named(folder, text, message):
    with pytest.raises(InputError, match=message):
        load_splits(data_dir=folder(text, ["1.jpg", "2.jpg"]))


@pytest.mark.parametrize(
    "text",
    [
        "file_name;label\n1.jpg;a\n2.jpg;b\n3.jpg;a\n4.jpg;b\n",
        "\ufefffile_name,label\n1.jpg,a\n2.jpg,b\n3.jpg,a\n4.jpg,b\n",
    ],
    ids=["semicolons", "mark"],
)
def test_tables_of_spreadsheets_are_read(folder, text):
    assert load_splits(data_dir=folder(text, [f"{i}.jpg" for i in range(1, 5)])).class_names == ["a", "b"]


def test_a_column_is_named(folder):
    text = "file_name,colour,shape\n" + "".join(f"{i}.jpg,{'rg'[i % 2]},round\n" for i in range(4))
    splits = load_splits(data_dir=folder(text, [f"{i}.jpg" for i in range(4)]), label_column_name="colour")
    assert splits.class_names == ["g", "r"]


@pytest.mark.parametrize("split", ["", "train/"])
@pytest.mark.parametrize("columns", ["text", "text,box"])
def test_class_folders_count_where_metadata_has_no_labels(folder, columns, split):
    images = [f"{split}{name}/{i}.jpg" for name in "ab" for i in range(2)]
    text = f"file_name,{columns}\n" + "".join(f"{image},a photo{',1' * columns.count(',')}\n" for image in images)
    splits = load_splits(data_dir=folder(text, images))
    assert splits.class_names == ["a", "b"]
    assert "metadata.csv has no column called label: folders name the classes." in splits.describe()


@pytest.mark.parametrize("others", [[], ["other/9.jpg"]], ids=["one_folder", "two_folders"])
def test_the_only_other_column_has_the_labels_of_folders_that_are_no_classes(folder, others):
    images = [f"images/{i}.jpg" for i in range(4)]
    text = "file_name,breed\n" + "".join(f"{image},{'ab'[i % 2]}\n" for i, image in enumerate(images))
    if not others:
        assert load_splits(data_dir=folder(text, images)).class_names == ["a", "b"]
    else:
        assert load_splits(data_dir=folder(text, images + others), label_column_name="breed").class_names == ["a", "b"]


@pytest.mark.parametrize("names", ["train val test", "Training dev Testing"])
def test_a_column_names_splits(folder, names):
    words = names.split()
    text = "file_name,label,split\n" + "".join(f"{i}.jpg,{'ab'[i % 2]},{words[i // 2 % 3]}\n" for i in range(12))
    splits = load_splits(data_dir=folder(text, [f"{i}.jpg" for i in range(12)]))
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [4, 4, 4]
    assert {image["path"].rsplit("/", 1)[1] for image in splits.test["image"]} == {
        "4.jpg",
        "5.jpg",
        "10.jpg",
        "11.jpg",
    }


@pytest.mark.parametrize("column", ["Split", "subset"])
def test_a_column_takes_precedence_over_folders(folder, column):
    """All images may lie in a folder called train."""
    rows = [(f"train/{i}.jpg", "ab"[i % 2], "train" if i < 8 else "val") for i in range(12)]
    text = f"file_name,label,{column}\n" + "".join(f"{','.join(row)}\n" for row in rows)
    splits = load_splits(data_dir=folder(text, [row[0] for row in rows]))
    assert [len(part) for part in (splits.train, splits.validation)] == [8, 4]
    assert f"split by column '{column}'" in splits.describe()


def test_a_row_without_a_split_belongs_to_its_folder(folder):
    rows = [(f"{'test' if i < 4 else 'train'}/{i}.jpg", "ab"[i % 2], "val" if i > 9 else "") for i in range(12)]
    text = "file_name,label,split\n" + "".join(f"{','.join(row)}\n" for row in rows)
    splits = load_splits(data_dir=folder(text, [row[0] for row in rows]))
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [6, 2, 4]


def test_an_image_in_two_splits_is_refused(folder):
    text = "file_name,label,split\n0.jpg,a,train\n1.jpg,b,train\n2.jpg,a,test\n3.jpg,b,test\n0.jpg,a,test\n"
    with pytest.raises(InputError, match=r"0\.jpg has two splits: 'train' in row 1 .* and 'test' in row 5"):
        load_splits(data_dir=folder(text, [f"{i}.jpg" for i in range(4)]))


@pytest.mark.parametrize("missing", ["", "extra"])
def test_a_row_of_no_split_is_refused(folder, missing):
    words = ["train", "train", "val", missing]
    text = "file_name,label,split\n" + "".join(f"{i}.jpg,{'ab'[i % 2]},{words[i % 4]}\n" for i in range(8))
    data = folder(text, [f"{i}.jpg" for i in range(8)])
    with pytest.raises(InputError, match=rf"Column 'split' holds .*, and no split is called '{missing}'"):
        load_splits(data_dir=data)
    assert len(load_splits(data_dir=data, train_split="train", eval_split="val").validation) == 2


def test_a_space_around_a_label_is_said(folder):
    text = "file_name, label\n" + "".join(f"{i}.jpg, {'ab'[i % 2]}\n" for i in range(4))
    assert (
        "class ' a', 1 image, begins or ends with a space."
        in load_splits(data_dir=folder(text, [f"{i}.jpg" for i in range(4)])).describe()
    )
