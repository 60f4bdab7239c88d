"""Predictions of a folder: those of `pipeline`, with what could not be read."""

from __future__ import annotations

import csv
import os
import shutil
import zipfile

import pytest
from cli_folders import hf_folder, photos, timm_folder  # noqa: F401
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor, pipeline

from entame_hf import InputError
from entame_hf.cli import predict


@pytest.fixture(params=["timm", "transformers"])
def model(request, timm_folder, hf_folder):  # noqa: F811
    return str(timm_folder if request.param == "timm" else hf_folder)


def rows_of(file):
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def test_probabilities_are_those_of_pipeline(tmp_path, photos, model):  # noqa: F811
    predict.main([model, str(photos / "red"), "--output", str(tmp_path / "p.csv"), "--batch_size", "7", "--use_cpu"])
    rows = rows_of(tmp_path / "p.csv")
    assert len(rows) == 40
    classify = pipeline("image-classification", model=model, top_k=3)
    for row in rows[::13]:
        expected = classify(row["file"])
        assert [row["label"], row["label_2"], row["label_3"]] == [found["label"] for found in expected]
        scores = [float(row[f"probability{s}"]) for s in ("", "_2", "_3")]
        assert scores == pytest.approx([found["score"] for found in expected], abs=2e-6)
        assert row["error"] == ""


def test_unreadable_images_are_named(tmp_path, photos, hf_folder, capsys):  # noqa: F811
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "red" / "7.png").write_bytes(b"<html>not an image</html>")
    (folder / "blue" / "0.png").write_bytes(b"")
    predict.main([str(hf_folder), str(folder), "--output", str(tmp_path / "p.csv"), "--top_k", "1", "--use_cpu"])
    failed = {row["file"]: row for row in rows_of(tmp_path / "p.csv") if row["error"]}
    assert sorted(failed) == [str(folder / "blue" / "0.png"), str(folder / "red" / "7.png")]
    assert all(row["label"] == row["probability"] == "" for row in failed.values())
    printed = capsys.readouterr()
    assert "118 images predicted, 2 not read" in printed.out
    assert all(name in printed.err for name in failed)


def test_images_are_named_where_they_lie(tmp_path, photos, hf_folder):  # noqa: F811
    """In a zip file, which is unpacked elsewhere, and by names that are not UTF-8."""
    folder, odd = tmp_path / "odd", os.fsdecode(b"caf\xe9.png")
    folder.mkdir()
    shutil.copy(photos / "red" / "0.png", folder / odd)
    shutil.copy(photos / "red" / "0.png", folder / "two\nlines.png")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.write(photos / "red" / "0.png", "a/é.png")
    found = []
    for given in (folder, tmp_path / "some.zip"):
        options = ["--output", str(tmp_path / "p.csv"), "--use_cpu", "--overwrite"]
        predict.main([str(hf_folder), str(given), *options])
        found += rows_of(tmp_path / "p.csv")
    assert [os.path.relpath(row["file"], tmp_path) for row in found] == [
        "odd/caf\\udce9.png",
        "odd/two\nlines.png",
        "some.zip/a/é.png",
    ]
    assert all(row["label"] and not row["error"] for row in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top_k", "0"], "--top_k 0 must be 1 or more"),
        (["--outptu", "x"], "Did you mean --output[?]"),
        (["more"], "Unexpected argument 'more'"),
    ],
)
def test_bad_options_are_refused(tmp_path, photos, hf_folder, options, message):  # noqa: F811
    with pytest.raises(InputError, match=message):
        predict.main([str(hf_folder), str(photos), "--output", str(tmp_path / "p.csv"), *options])
    assert not (tmp_path / "p.csv").exists()


def test_a_file_is_not_replaced_unless_asked_for(tmp_path, photos, hf_folder):  # noqa: F811
    file = tmp_path / "p.csv"
    file.write_text("mine")
    argv = [str(hf_folder), str(photos / "red"), "--output", str(file), "--use_cpu"]
    with pytest.raises(InputError, match="Replace it"):
        predict.main(argv)
    assert file.read_text() == "mine"
    predict.main([*argv, "--overwrite"])
    assert len(rows_of(file)) == 40
    device = tmp_path / "device.csv"
    device.symlink_to("/dev/null")
    with pytest.raises(InputError, match="give another file"):
        predict.main([*argv[:2], "--output", str(device), "--overwrite"])
    assert device.is_symlink()


@pytest.mark.parametrize("kind", ["missing", "empty", "broken"])
def test_a_folder_without_images_is_refused(tmp_path, hf_folder, kind):  # noqa: F811
    folder = tmp_path / "photos"
    if kind != "missing":
        folder.mkdir()
    if kind == "broken":
        (folder / "a.png").write_bytes(b"x")
    with pytest.raises(InputError):
        predict.main([str(hf_folder), str(folder), "--output", str(tmp_path / "p.csv"), "--use_cpu"])
    assert not (tmp_path / "p.csv").exists()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"problem_type": "multi_label_classification"}, "multi_label_classification"),
        ({"problem_type": "regression"}, "regression"),
        ({"id2label": {"0": "age"}, "label2id": {"age": 0}}, "regression"),
    ],
)
def test_a_model_whose_outputs_are_no_probabilities_of_classes_is_refused(
    tmp_path,
    photos,  # noqa: F811
    changes,
    kind,
):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], **changes)
    ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match=f"is a model of {kind}"):
        predict.main([str(tmp_path / "model"), str(photos), "--output", str(tmp_path / "p.csv"), "--use_cpu"])
    assert not (tmp_path / "p.csv").exists()


def test_a_model_without_its_head_is_refused(tmp_path, photos):  # noqa: F811
    with pytest.raises(InputError, match=r"Cannot load [^`]*: "):
        predict.main([str(tmp_path / "none"), str(photos)])
