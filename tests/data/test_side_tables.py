"""Tables beside class folders: labels that no folder holds are never passed over."""

import json

import pytest
from datasets import Dataset

from entame_hf.data.folders import open_folder, read_folder
from entame_hf.errors import InputError

KINDS = ["cat", "dog", "fox"]
# Images in two parts, as of an archive: name, part and label.
PARTS = [(f"{i:03}", f"part_{i // 24}", KINDS[i % 3]) for i in range(48)]


def draw(root, images, above=""):
    for name, folder, _ in images:
        (root / above / folder).mkdir(parents=True, exist_ok=True)
        (root / above / folder / f"{name}.jpg").touch()


def lines(*rows):
    return "".join(f"{row}\n" for row in rows)


def rows_of(write, images=PARTS):
    return [write(*image) for image in images]


TABLES = {
    "labels.csv": lines("file,label", *rows_of(lambda n, f, k: f"{f}/{n}.jpg,{k}")),
    "ham.csv": lines("lesion,image_id,dx,age", *rows_of(lambda n, f, k: f"L{n},{n},{k},{int(n) % 7}")),
    # Nine of ten are benign, in each part.
    "rare.csv": lines("image_name,malignant", *rows_of(lambda n, f, k: f"{n},{int(int(n) % 10 == 0)}")),
    "labels.tsv": lines("name\tspecies", *rows_of(lambda n, f, k: f"{n}.jpg\t{k}")),
    "labels.txt": lines(*rows_of(lambda n, f, k: f"./{f}/{n}.jpg {KINDS.index(k)}")),
    "labels.jsonl": lines(*rows_of(lambda n, f, k: json.dumps({"path": f"{f}\\{n}.jpg", "class": k}))),
    "labels.json": json.dumps({f"{n}.jpg": k for n, _, k in PARTS}),
    "list.json": json.dumps([{"id": f"{n}.jpg", "kind": k} for n, _, k in PARTS]),
    "coco.json": json.dumps(
        {
            "images": [{"id": i, "file_name": f"{n}.jpg"} for i, (n, _, _) in enumerate(PARTS)],
            "annotations": [{"image_id": i, "category_id": KINDS.index(k)} for i, (_, _, k) in enumerate(PARTS)],
        }
    ),
}


def read(root, **options):
    return read_folder(open_folder(root), **options)


@pytest.mark.parametrize("above", ["", "images"])
@pytest.mark.parametrize("table", TABLES)
def test_parts_of_an_archive_are_no_classes_beside_a_table_of_labels(table, above, tmp_path):
    draw(tmp_path, PARTS, above)
    (tmp_path / table).write_text(TABLES[table].replace("part_", f"{above}/part_") if above else TABLES[table])
    with pytest.raises(InputError, match=r"none of its columns .* follows from the folders.*part_0, part_1"):
        read(tmp_path)
    assert set(read(tmp_path, data_layout="CLASS").splits["train"]["label"]) == {"part_0", "part_1"}


def test_a_table_of_parquet_is_read_too(tmp_path):
    draw(tmp_path, PARTS)
    columns = {"file": [f"{n}.jpg" for n, _, _ in PARTS], "label": [k for _, _, k in PARTS]}
    Dataset.from_dict(columns).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"train\.parquet names these images.*metadata\.csv"):
        read(tmp_path)


def test_a_metadata_file_of_other_columns_asks_for_the_one_of_labels(tmp_path):
    draw(tmp_path, PARTS)
    rows = rows_of(lambda n, f, k: f"{f}/{n}.jpg,{k},{int(n) % 7}")
    (tmp_path / "metadata.csv").write_text(lines("file_name,dx,age", *rows))
    with pytest.raises(InputError, match="`label_column_name=dx`"):
        read(tmp_path)
    assert set(read(tmp_path, label_column_name="dx").splits["train"]["dx"]) == set(KINDS)


CLASSES = [(name, kind, kind) for name, _, kind in PARTS]


@pytest.mark.parametrize(
    ("table", "note"),
    [
        (lines("file,label", *rows_of(lambda n, f, k: f"{n}.jpg,{k.upper()}", CLASSES)), False),
        # Animals of which two are pets, with the age of each.
        (lines("file,pet,age", *rows_of(lambda n, f, k: f"{n},{k != 'fox'},{int(n) % 5}", CLASSES)), False),
        (lines("file", *rows_of(lambda n, f, k: f"{f}/{n}.jpg", CLASSES)), True),
        (lines("file,split", *rows_of(lambda n, f, k: f"{n},{'train' if int(n) % 3 else 'test'}", CLASSES)), True),
        (lines("file,author", *rows_of(lambda n, f, k: f"{n},{'ab'[int(n) % 2]}", CLASSES)), True),
        (lines("file,label", *[f"other{i},{KINDS[i % 2]}" for i in range(48)]), False),
        ("no\0table", False),
    ],
    ids=["agrees", "coarser", "list", "splits", "credits", "other_images", "broken"],
)
def test_folders_are_classes_beside_tables_that_do_not_contradict_them(table, note, tmp_path):
    draw(tmp_path, CLASSES)
    (tmp_path / "table.csv").write_text(table)
    source = read(tmp_path)
    assert set(source.splits["train"]["label"]) == set(KINDS)
    assert any("table.csv names these images and is not read" in text for text in source.notes) == note


@pytest.mark.parametrize("files", [1, 30])
def test_boxes_of_one_class_or_a_file_an_image_say_nothing_of_classes(files, tmp_path):
    images = [(f"{folder}_{i:02}", f"{folder}/images", "") for folder in ("n01443537", "n01629819") for i in range(30)]
    draw(tmp_path, images)
    for folder in ("n01443537", "n01629819"):
        for i in range(files):
            rows = [f"{folder}_{j:02}.jpg\t{j % 4}\t{j % 3}" for j in (range(30) if files == 1 else [i])]
            (tmp_path / folder / f"{i}.txt").write_text(lines(*rows))
    source = read(tmp_path)
    assert set(source.splits["train"]["label"]) == {"n01443537", "n01629819"}
    assert not any("is not read" in note for note in source.notes)


def test_sizes_of_images_in_folders_of_wordnet_ids_are_a_note(tmp_path):
    images = [(f"{i:03}", f"n0144353{i % 3}", "") for i in range(48)]
    draw(tmp_path, images)
    (tmp_path / "sizes.csv").write_text(lines("file,width", *rows_of(lambda n, f, k: f"{n},{int(n) % 7}", images)))
    assert any("sizes.csv names these images and is not read" in note for note in read(tmp_path).notes)


def test_a_table_of_names_that_every_class_repeats_says_nothing(tmp_path):
    draw(tmp_path, [(f"{i // 3:03}", KINDS[i % 3], "") for i in range(48)])
    (tmp_path / "table.csv").write_text(lines("file,label", *[f"{i:03}.jpg,{'ab'[i % 2]}" for i in range(16)]))
    assert len(read(tmp_path).splits["train"]) == 48


@pytest.mark.parametrize("beside", ["masks", "annotations/trimaps"])
@pytest.mark.parametrize("name", ["images", "Imgs"])
def test_a_folder_of_all_images_is_no_class(name, beside, tmp_path):
    for top in ("", "train", "test"):
        draw(tmp_path / "set" / top, [(f"{i:03}", folder, "") for i in range(6) for folder in (name, beside)])
        with pytest.raises(InputError, match=rf"{name} holds 6 images and no class folders, and lies beside"):
            read(tmp_path / "set" / top)
    assert read(tmp_path / "set" / "test", data_layout="CLASS").splits
