"""The script, as a user runs it: in a process of its own, and its errors in this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from conftest import TINY_VIT, launch_by
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    pipeline,
)

from entame_hf import InputError
from entame_hf.cli import finetune
from entame_hf.data import load_splits
from entame_hf.patch import as_transformers, stock_state_dict

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"


def write_images(folder: Path, classes: dict[str, tuple[int, int, int]], count: int, side: int = 40) -> None:
    """Write noise around a colour, one a class: something to learn."""
    generator = np.random.default_rng(0)
    for name, colour in classes.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = np.clip(np.array(colour) + generator.normal(0, 40, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_images(folder, COLOURS, count=40)
    return folder


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory) -> Path:
    """A pretrained timm model as the Hub holds it."""
    folder = tmp_path_factory.mktemp("timm_model")
    torch.manual_seed(0)
    model = as_transformers(timm.create_model("test_resnet", num_classes=1000)).train()
    with torch.no_grad():
        for _ in range(50):
            # A pretrained model's running statistics fit its weights.
            model(torch.randn(32, 3, 32, 32))
    model.config.pretrained_cfg = {**model.config.pretrained_cfg, "input_size": (3, 32, 32), "crop_pct": 0.9}
    model.config.model_args = {}
    model.save_pretrained(folder, state_dict=stock_state_dict(model))
    return folder


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("transformers_model")
    torch.manual_seed(0)
    config = ResNetConfig(num_labels=1000, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ResNetForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def arguments(model: Path, data: Path, out: Path, **changes) -> list[str]:
    options = {
        "model_name_or_path": model,
        "data_dir": data,
        "output_dir": out,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 16,
        "use_cpu": True,
        "disable_tqdm": True,
        **changes,
    }
    return [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]


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


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_options_from_a_file(tmp_path, photos, timm_folder, suffix):
    options = {
        "model_name_or_path": str(timm_folder),
        "data_dir": str(photos),
        "output_dir": str(tmp_path / "out"),
        "max_steps": 1,
        "use_cpu": True,
        "entame_method": "mei",
        # In YAML 1.1 this is a string.
        "phi_w": "1e-10",
    }
    file = tmp_path / f"run.{suffix}"
    file.write_text(yaml.safe_dump(options) if suffix == "yaml" else json.dumps(options))
    finetune.main([str(file)])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["entame"]["method"] == "mei"


def test_inspecting_writes_nothing(tmp_path, photos, timm_folder, capsys):
    out = tmp_path / "out"
    finetune.main([*arguments(timm_folder, photos, out), "--inspect"])
    printed = capsys.readouterr().out
    assert "timm_model.fc: 3 classes, ln C = 1.099; first step on 64 images" in printed
    assert [line.split()[0] for line in printed.splitlines()[2:7]] == ["base", "keep", "mei", "fn", "entame"]
    assert printed.splitlines()[-1].startswith("Start the head")
    assert not out.exists()
    # Another run's folder is no obstacle, and stays as it is.
    out.mkdir()
    (out / "trainer_state.json").write_text("{}")
    finetune.main([*arguments(timm_folder, photos, out), "--inspect", "--overwrite"])
    assert [path.name for path in out.iterdir()] == ["trainer_state.json"]


def test_an_interrupted_run_goes_on(tmp_path, photos, timm_folder):
    whole = arguments(timm_folder, photos, tmp_path / "whole")
    finetune.main(whole)
    finetune.main(arguments(timm_folder, photos, tmp_path / "half"))
    (tmp_path / "half" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "half" / "checkpoint-14")
    finetune.main([*arguments(timm_folder, photos, tmp_path / "half"), "--resume_from_checkpoint", "last"])
    first = AutoModelForImageClassification.from_pretrained(tmp_path / "whole").state_dict()
    second = AutoModelForImageClassification.from_pretrained(tmp_path / "half").state_dict()
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_an_unreadable_image_is_named_and_counted(tmp_path, photos, timm_folder, capsys, caplog):
    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos" / "red" / "7.png").write_bytes(b"<html>not an image</html>")
    finetune.main(arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))
    assert "red/7.png" in caplog.text
    assert "1 of 102 images could not be read and were skipped" in capsys.readouterr().out


class TestBadInput:
    """One line, exit code 2, nothing half-written."""

    def refuse(self, message, argv):
        with pytest.raises(InputError, match=message) as error:
            finetune.main(argv)
        assert len(" ".join(str(error.value).split())) < 700

    def test_ends_the_process_with_2_and_one_line(self, tmp_path, photos):
        command = [sys.executable, str(SCRIPT), *arguments(tmp_path / "none", photos, tmp_path / "out")]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 2
        assert (
            result.stderr.strip().splitlines()[-1].startswith("finetune.py: error: Cannot load --model_name_or_path")
        )
        assert "Traceback" not in result.stderr
        assert len(result.stderr.strip().splitlines()[-1]) < 700
        assert not (tmp_path / "out").exists()

    def test_an_unknown_option_ends_with_2(self, tmp_path, photos, timm_folder):
        with pytest.raises((SystemExit, InputError)) as end:
            finetune.main([*arguments(timm_folder, photos, tmp_path / "out"), "--learning_rat", "1"])
        assert getattr(end.value, "code", 2) == 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"phi_w": 0}, "phi_w=0.0 must be a positive number"),
            ({"phi_w": -1}, "positive"),
            ({"noise_lambda": 0}, "noise_lambda"),
            ({"entame_method": "magic"}, "base, base_wu, mei, fn, entame, keep"),
            ({"num_labels": 7}, "the data has 3 classes"),
            ({"image_size": 0}, "--image_size 0"),
            ({"test_fraction": 1.5}, "test_fraction.1.5"),
            ({"model_name_or_path": "/nowhere/model"}, "Cannot load --model_name_or_path /nowhere/model"),
            ({"data_dir": "/nowhere/images"}, "/nowhere/images"),
            ({"model_name_or_path": None}, "--model_name_or_path"),
            ({"data_dir": None}, "--data_dir"),
            ({"resume_from_checkpoint": "last"}, "no checkpoint there"),
            ({"resume_from_checkpoint": "/nowhere"}, "no checkpoint there"),
            ({"output_dir": "/proc/out"}, "cannot be written to"),
            ({"learning_rate": -1}, "--learning_rate -1.0 must be 0 or more"),
            ({"learning_rate": "abc"}, "--learning_rate.*abc"),
            ({"per_device_train_batch_size": 0}, "--per_device_train_batch_size 0 must be 1 or more"),
            ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps"),
            ({"num_train_epochs": -1}, "--num_train_epochs"),
            ({"num_train_epochs": "nan"}, "--num_train_epochs nan must be a positive number"),
            ({"learning_rate": "nan"}, "--learning_rate nan must be 0 or more"),
            ({"dataloader_num_workers": -1}, "--dataloader_num_workers -1 must be 0 or more"),
            ({"image_cache_gb": "nan"}, "image_cache_gb.nan. must be 0"),
            ({"mixup_alpha": "inf"}, "--mixup_alpha inf must be 0"),
            ({"cutmix_alpha": "nan"}, "--cutmix_alpha nan must be 0"),
            ({"seed": -1}, "--seed"),
            ({"metric_for_best_model": "auc"}, "loss, accuracy, accuracy_macro, f1_macro"),
            ({"normalization": "bogus"}, "--normalization"),
            ({"eval_strategy": "no", "load_best_model_at_end": True}, "load_best_model_at_end"),
        ],
        ids=str,
    )
    def test_values(self, tmp_path, photos, timm_folder, changes, message):
        out = tmp_path / "out"
        self.refuse(message, arguments(timm_folder, photos, out, **changes))
        assert not out.exists()

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("run.yaml", "- a", "must hold one mapping"),
            ("run.yaml", "", "must hold one mapping"),
            ("run.yaml", "a: [", "run.yaml cannot be read"),
            ("run.json", "[1]", "must hold one mapping"),
            ("run.json", "{", "run.json cannot be read"),
            ("run.yaml", "learning_rat: 1", "Unknown option --learning_rat"),
            ("run.yaml", "normalization: bogus", "--normalization"),
            ("run.yaml", "per_device_eval_batch_size: many", "--per_device_eval_batch_size"),
        ],
    )
    def test_files_of_options(self, tmp_path, name, text, message):
        (tmp_path / name).write_text(text)
        self.refuse(message, [str(tmp_path / name)])

    def test_a_file_beside_options(self, tmp_path):
        self.refuse("not from both", [str(tmp_path / "run.yaml"), "--seed", "1"])

    def test_overwriting_costs_nothing_until_all_is_well(self, tmp_path, photos, timm_folder):
        out = tmp_path / "out"
        finetune.main(arguments(timm_folder, photos, out, max_steps=1))
        before = {path.name for path in out.iterdir()}
        again = arguments(timm_folder, photos, out, overwrite=True)
        self.refuse("/nowhere", [*again, "--data_dir", "/nowhere"])
        self.refuse("--overwrite would remove", [*again, "--model_name_or_path", str(out)])
        assert {path.name for path in out.iterdir()} == before

    def test_a_size_that_the_model_does_not_take(self, tmp_path, photos):
        ViTForImageClassification(ViTConfig(**TINY_VIT)).save_pretrained(tmp_path / "vit")
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
        self.refuse(
            "no images of 24×24.*--image_size", arguments(tmp_path / "vit", photos, tmp_path / "out", image_size=24)
        )

    def test_weights_in_a_pickle_are_not_loaded(self, tmp_path, photos, hf_folder):
        shutil.copytree(hf_folder, tmp_path / "pickled")
        (tmp_path / "pickled" / "model.safetensors").unlink()
        model = AutoModelForImageClassification.from_pretrained(hf_folder)
        torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
        self.refuse("safetensors", arguments(tmp_path / "pickled", photos, tmp_path / "out"))

    def test_one_class(self, tmp_path, timm_folder):
        write_images(tmp_path / "photos", {"red": (200, 40, 40)}, count=3)
        self.refuse("one class", arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))

    def test_a_class_that_training_lacks(self, tmp_path, timm_folder):
        write_images(tmp_path / "photos" / "train", {k: COLOURS[k] for k in ("red", "blue")}, count=4)
        write_images(tmp_path / "photos" / "validation", COLOURS, count=2)
        self.refuse("green", arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))

    def test_a_label_column_that_does_not_exist(self, tmp_path, timm_folder):
        import datasets

        rows = {"image": [Image.new("RGB", (8, 8))] * 4, "label": ["a", "b"] * 2}
        (tmp_path / "data").mkdir()
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "data" / "train.parquet")
        argv = arguments(timm_folder, None, tmp_path / "out", dataset_name=tmp_path / "data", label_column_name="kind")
        self.refuse("kind.*image, label", argv)

    def test_too_many_unreadable_images(self, tmp_path, photos, timm_folder):
        shutil.copytree(photos, tmp_path / "photos")
        for index in range(8):
            (tmp_path / "photos" / "red" / f"{index}.png").write_bytes(b"")
        self.refuse("At most 1%", arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))

    def test_another_run_is_not_wiped(self, tmp_path, photos, timm_folder):
        out = tmp_path / "out"
        argv = arguments(timm_folder, photos, out, max_steps=1)
        finetune.main(argv)
        (out / "notes.txt").write_text("mine")
        before = (out / "model.safetensors").read_bytes()
        self.refuse("holds another run .*--overwrite", argv)
        assert (out / "model.safetensors").read_bytes() == before
        finetune.main([*argv, "--overwrite", "true", "--entame_method", "mei"])
        assert (out / "notes.txt").read_text() == "mine"
        assert json.loads((out / "config.json").read_text())["entame"]["method"] == "mei"

    def test_remote_code_does_not_run_unless_asked_for(self, tmp_path, photos, timm_folder):
        folder = tmp_path / "remote"
        shutil.copytree(timm_folder, folder)
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = "mine"
        config["auto_map"] = {
            "AutoConfig": "code.Config",
            "AutoModelForImageClassification": "code.Model",
            "AutoImageProcessor": "code.Processor",
        }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "code.py").write_text(
            textwrap.dedent(f"""
            open({str(tmp_path / "ran")!r}, "w").close()
            class Config: pass
            class Model: pass
            class Processor: pass
        """)
        )
        self.refuse("trust_remote_code", arguments(folder, photos, tmp_path / "out"))
        assert not (tmp_path / "ran").exists()


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


@pytest.mark.slow
def test_demo(tmp_path):
    command = [sys.executable, str(SCRIPT), "--output_dir", str(tmp_path / "demo"), "--num_train_epochs", "2"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    usual, base, entame = (
        [float(part.rstrip("%")) for part in line.split() if part.endswith("%")]
        for line in result.stdout.splitlines()
        if line.startswith(("as usual", "He fan-out", "ENTAME"))
    )
    assert usual[0] == pytest.approx(13.2, abs=1)
    assert base[0] == pytest.approx(50, abs=3)
    assert entame[0] == pytest.approx(11.1, abs=0.1)
    assert entame[1] > usual[1] + 5
    assert entame[2] > usual[2] + 5
    assert "--data_dir your/images" in result.stdout


@pytest.mark.slow
def test_inspecting_the_demonstration(tmp_path):
    result = subprocess.run([sys.executable, str(SCRIPT), "--inspect"], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    base, keep, mei, _, entame = (line.split()[1:] for line in result.stdout.splitlines()[2:7])
    assert float(base[2].rstrip("%")) == pytest.approx(50, abs=3)
    assert mei[2] == entame[2] == "11.1%"
    assert 12 < float(keep[2].rstrip("%")) < 15
    assert list(tmp_path.iterdir()) == []


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


def test_a_stream_is_trained_on_for_so_many_steps(tmp_path, photos, timm_folder):
    parts = load_splits(data_dir=str(photos))
    for name, part in (("train", parts.train), ("test", parts.validation)):
        part.map(lambda row: {"image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}}).to_parquet(
            tmp_path / "data" / f"{name}.parquet"
        )
    command = arguments(timm_folder, photos, tmp_path / "out")
    command[command.index("--data_dir") : command.index("--data_dir") + 2] = ["--dataset_name", str(tmp_path / "data")]
    with pytest.raises(InputError, match="--streaming needs --max_steps"):
        finetune.main([*command, "--streaming"])
    finetune.main([*command, "--streaming", "--max_steps", "9"])
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
