"""Fine-tuning from photos to a model that anybody loads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from cli_folders import COLOURS, SCRIPT, arguments, hf_folder, photos, timm_folder, write_images  # noqa: F401
from conftest import launch_by
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor, pipeline

from entame_hf import InputError
from entame_hf.cli import finetune, inspect
from entame_hf.data import load_splits

pytestmark = pytest.mark.runs

# Fixtures.
# ruff: noqa: F811


def history_of(out: Path) -> list[dict]:
    return json.loads((out / "trainer_state.json").read_text())["log_history"]


def results_of(out: Path) -> dict:
    return json.loads((out / "all_results.json").read_text())


def test_from_a_folder_of_photos_to_a_model_that_pipeline_loads(tmp_path, photos, timm_folder):
    command = [sys.executable, str(SCRIPT), *arguments(timm_folder, photos, tmp_path / "out", num_train_epochs=4)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ACCELERATE_USE_CPU": "1"})
    assert result.returncode == 0, result.stderr
    out = tmp_path / "out"
    names = {path.name for path in out.iterdir()}
    assert {"all_results.json", "train_results.json", "eval_results.json", "trainer_state.json"} <= names
    results = json.loads((out / "all_results.json").read_text())
    assert results["eval_accuracy"] > 0.5
    config = json.loads((out / "config.json").read_text())
    assert config["label_names"] == sorted(COLOURS)
    assert config["entame"]["method"] == "entame"
    assert AutoModelForImageClassification.from_pretrained(out).config.id2label == {0: "blue", 1: "green", 2: "red"}
    assert timm.create_model(f"local-dir:{out}", pretrained=True).pretrained_cfg["label_names"] == sorted(COLOURS)

    classify = pipeline("image-classification", model=str(out))
    held_out = load_splits(data_dir=str(photos), seed=42).validation
    right = sum(classify(row["image"]["path"])[0]["label"] == sorted(COLOURS)[row["label"]] for row in held_out)
    assert right / len(held_out) == pytest.approx(results["eval_accuracy"])


def test_transformers_own_models_keep_their_processor(tmp_path, photos, hf_folder):
    finetune.main(arguments(hf_folder, photos, tmp_path / "out", image_size=24, normalization="dataset"))
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert processor(Image.new("RGB", (60, 50)), return_tensors="pt")["pixel_values"].shape == (1, 3, 24, 24)
    assert processor.image_mean == pytest.approx([0.37, 0.37, 0.37], abs=0.05)
    assert processor.image_mean != ViTImageProcessor().image_mean
    assert (tmp_path / "out" / "checkpoint-14" / "preprocessor_config.json").exists()


def test_normalization_of_the_data_set_is_what_timms_config_holds(tmp_path, photos, timm_folder):
    finetune.main(
        arguments(timm_folder, photos, tmp_path / "out", image_size=24, normalization="dataset", num_train_epochs=1)
    )
    cfg = json.loads((tmp_path / "out" / "config.json").read_text())["pretrained_cfg"]
    assert cfg["input_size"] == [3, 24, 24]
    assert cfg["mean"] == pytest.approx([0.37, 0.37, 0.37], abs=0.05)
    assert AutoImageProcessor.from_pretrained(tmp_path / "out").data_config["std"] == pytest.approx(cfg["std"])


@pytest.mark.parametrize("command", [finetune.main, inspect.main], ids=["finetune --inspect", "inspect"])
def test_inspecting_writes_nothing(tmp_path, photos, timm_folder, capsys, command):
    out = tmp_path / "out"
    options = [*arguments(timm_folder, photos, out), *(["--inspect"] if command == finetune.main else [])]
    command(options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Splits: train 102")
    first = next(i for i, line in enumerate(lines) if line.startswith("timm_model.fc: 3 classes, ln C = 1.099"))
    assert {"base", "keep", "mei", "fn", "entame"} <= {line.split()[0] for line in lines[first + 2 :]}
    assert not out.exists()
    # Another run's folder is no obstacle, and stays as it is.
    out.mkdir()
    (out / "trainer_state.json").write_text("{}")
    command([*options, "--overwrite"])
    assert [path.name for path in out.iterdir()] == ["trainer_state.json"]


def test_an_unreadable_image_is_named_and_counted(tmp_path, photos, timm_folder, capsys, caplog):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "red" / "7.png").write_bytes(b"<html>not an image</html>")
    finetune.main(arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))
    assert "red/7.png" in caplog.text
    assert "1 of 102 images could not be read and were skipped" in capsys.readouterr().out


def test_test_images_are_evaluated_once_at_the_end(tmp_path, photos, timm_folder, capsys):
    data = tmp_path / "data"
    write_images(data / "train", COLOURS, count=12)
    write_images(data / "val", COLOURS, count=4, side=41)
    write_images(data / "test", COLOURS, count=5, side=42)
    shutil.copy(data / "train" / "red" / "0.png", data / "val" / "red" / "copy.png")
    (data / "train" / "blue" / "broken.png").write_bytes(b"x")
    out = tmp_path / "out"
    finetune.main(arguments(timm_folder, data, out, gradio=True, logging_steps=1))
    history = history_of(out)
    assert [entry["step"] for entry in history if "test_accuracy" in entry] == [6]
    assert len({entry["step"] for entry in history if "eval_accuracy" in entry}) == 2
    assert {"eval_accuracy", "test_accuracy", "test_f1_macro"} <= results_of(out).keys()
    assert "broken.png" in (out / "skipped_images.csv").read_text()
    assert Image.open(out / "batch.png").width > 300
    compile((out / "app.py").read_text(), "app.py", "exec")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Splits: train 37")
    assert any(line.startswith("Run: entame") for line in lines)
    assert "Evaluation: by feature statistics of up to 1,000 training images, as batches are small." in lines
    assert any(line.startswith("Note: 1 image of validation is in train too, such as") for line in lines)
    assert [line.split("  ")[0].split("/")[0] for line in lines if line.startswith(("step", "epoch"))] == [
        *["step 1", "step 2", "step 3", "epoch 1"],
        *["step 4", "step 5", "step 6", "epoch 2"],
    ]
    end = [line.split()[0] for line in lines[lines.index(next(x for x in lines if x.startswith("Done"))) :]]
    assert end == ["Done", "model", "weights", "validation", "test", "card", "load", "predict", "continue"]
    assert not any("energy" in line for line in lines)


def test_statistics_that_were_asked_for_need_no_reason(tmp_path, photos, timm_folder, capsys):
    finetune.main(arguments(timm_folder, photos, tmp_path / "out", max_steps=1, znorm_refresh_samples=30))
    assert "as batches are small" not in capsys.readouterr().out


def test_a_run_stops_when_patience_ends(tmp_path, photos, timm_folder):
    # Nothing is learned.
    options = {"learning_rate": 0, "entame_method": "keep", "num_train_epochs": 9, "patience": 2}
    finetune.main(arguments(timm_folder, photos, tmp_path / "out", **options))
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 3 * 7


class TestAdaptedModels:
    def test_the_same_classes_go_on_only_where_asked(self, tmp_path, photos, timm_folder):
        finetune.main(arguments(timm_folder, photos, tmp_path / "first", max_steps=1))
        with pytest.raises(InputError, match="--entame_method keep"):
            finetune.main(arguments(tmp_path / "first", photos, tmp_path / "second", max_steps=1))
        finetune.main(arguments(tmp_path / "first", photos, tmp_path / "third", max_steps=1, entame_method="keep"))

    def test_as_many_other_classes_get_a_new_head(self, tmp_path, photos, timm_folder):
        finetune.main(arguments(timm_folder, photos, tmp_path / "first", max_steps=1))
        write_images(tmp_path / "others", dict(zip(("x", "y", "z"), COLOURS.values(), strict=True)), count=20)
        finetune.main(arguments(tmp_path / "first", tmp_path / "others", tmp_path / "second", max_steps=1))
        config = json.loads((tmp_path / "second" / "config.json").read_text())
        assert config["label_names"] == ["x", "y", "z"]
        assert config["entame"]["method"] == "entame"
        state = json.loads((tmp_path / "second" / "trainer_state.json").read_text())
        losses = [entry["train_loss"] for entry in state["log_history"] if "train_loss" in entry]
        assert losses[0] == pytest.approx(np.log(3), abs=1e-3)


def test_images_are_cropped_and_mixed_and_classes_weighed(tmp_path, photos, timm_folder):
    options = {
        "augmentation": "random_resized_crop",
        "mixup_alpha": 0.2,
        "cutmix_alpha": 1,
        "class_weights": "balanced",
    }
    finetune.main(arguments(timm_folder, photos, tmp_path / "out", max_steps=2, **options))
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert {"eval_accuracy", "eval_accuracy_macro"} <= results.keys()


def test_a_stream_is_trained_on_for_so_many_steps(tmp_path, photos, timm_folder, capsys):
    parts = load_splits(data_dir=str(photos))
    for name, part in (("train", parts.train), ("test", parts.validation)):
        part.map(lambda row: {"image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}}).to_parquet(
            tmp_path / "data" / f"{name}.parquet"
        )
    command = arguments(timm_folder, photos, tmp_path / "out")
    command[command.index("--data_dir") : command.index("--data_dir") + 2] = ["--dataset_name", str(tmp_path / "data")]
    with pytest.raises(InputError, match="--streaming needs --max_steps"):
        finetune.main([*command, "--streaming"])
    with pytest.raises(InputError, match="--train_sampling_strategy sequential has no effect on this stream"):
        finetune.main([*command, "--streaming", "--max_steps", "9", "--train_sampling_strategy", "sequential"])
    finetune.main([*command, "--streaming", "--max_steps", "9"])
    out = capsys.readouterr().out
    # Trainer divides the steps of a pass by those of the run.
    assert "9 steps." in out
    assert "epoch" not in out
    assert json.loads((tmp_path / "out" / "trainer_state.json").read_text())["global_step"] == 9


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_deepspeed_by_its_configuration(tmp_path, monkeypatch, photos, timm_folder, hf_folder, library, stage):
    """A new head of other classes, batch normalisation and bfloat16, on two processes."""
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    model = timm_folder if library == "timm" else hf_folder
    options = arguments(model, photos, tmp_path / "out", learning_rate=1e-2, head_lr=1e-2, num_train_epochs=4)
    result = launch_by(f"zero{stage}", str(SCRIPT), *options)
    assert result.returncode == 0, result.stderr[-3000:]
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert loaded.num_labels == 3
    splits = load_splits(data_dir=str(photos))
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    correct = 0
    for row in splits.validation:
        image = Image.open(row["image"]["path"])
        with torch.no_grad():
            correct += int(loaded(**processor(image, return_tensors="pt")).logits.argmax()) == row["label"]
    assert correct / len(splits.validation) == pytest.approx(results["eval_accuracy"], abs=0.06)
    assert results["eval_accuracy"] > 0.6
