"""Bad input ends with one line and exit code 2, and leaves every file as it was."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from cli_folders import COLOURS, SCRIPT, arguments, contents, hf_folder, photos, timm_folder, write_images  # noqa: F401
from conftest import TINY_VIT
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessor

from entame_hf import InputError
from entame_hf.cli import finetune
from entame_hf.cli.launch import run_command

# Fixtures.
# ruff: noqa: F811


def refuse(message, argv):
    with pytest.raises(InputError, match=message) as error:
        finetune.main(argv)
    assert len(" ".join(str(error.value).split())) < 700


@pytest.mark.runs
def test_ends_the_process_with_2_and_one_line(tmp_path, photos):
    command = [sys.executable, str(SCRIPT), *arguments(tmp_path / "none", photos, tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("finetune.py: error: Cannot load --model_name_or_path")
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()[-1]) < 700
    assert not (tmp_path / "out").exists()


def test_an_unknown_option_ends_with_2(tmp_path, photos, timm_folder):
    with pytest.raises((SystemExit, InputError)) as end:
        finetune.main([*arguments(timm_folder, photos, tmp_path / "out"), "--learning_rat", "1"])
    assert getattr(end.value, "code", 2) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phi_w": 0}, "--phi_w 0.0 must be a positive number"),
        ({"phi_w": -1}, "positive"),
        ({"noise_lambda": 0}, "noise_lambda"),
        ({"entame_method": "magic"}, "base, base_wu, mei, fn, entame"),
        ({"num_labels": 7}, "the data has 3 classes"),
        ({"image_size": 0}, "--image_size 0"),
        ({"test_fraction": 1.5}, "--test_fraction 1.5"),
        ({"model_name_or_path": "/nowhere/model"}, "Cannot load --model_name_or_path /nowhere/model"),
        ({"data_dir": "/nowhere/images"}, "/nowhere/images"),
        ({"model_name_or_path": None}, "--model_name_or_path"),
        ({"data_dir": None}, "--data_dir"),
        ({"resume_from_checkpoint": "last"}, "no checkpoint there"),
        ({"resume_from_checkpoint": "/nowhere"}, "no checkpoint there"),
        ({"image_cache_gb": "nan"}, "--image_cache_gb nan must be 0"),
        ({"mixup_alpha": "inf"}, "--mixup_alpha inf must be 0"),
        ({"cutmix_alpha": "nan"}, "--cutmix_alpha nan must be 0"),
        ({"metric_for_best_model": "auc"}, "loss, accuracy, accuracy_macro, f1_macro"),
        ({"normalization": "bogus"}, "--normalization"),
        ({"eval_strategy": "no", "load_best_model_at_end": True}, "load_best_model_at_end"),
    ],
    ids=str,
)
def test_values(tmp_path, photos, timm_folder, changes, message):
    out = tmp_path / "out"
    refuse(message, arguments(timm_folder, photos, out, **changes))
    assert not out.exists()


NUMBERS = {
    "learning_rate": ["-1", "nan", "inf", "1e400", "fast"],
    "per_device_train_batch_size": ["0", "-1", "nan", "1.5", "many", "99999999999999999999"],
    "per_device_eval_batch_size": ["0", "2147483648"],
    "gradient_accumulation_steps": ["0", "nan", "99999999999999999999"],
    "seed": ["-1", "nan", "1.5", "now", "4294967296", "18446744073709551616"],
    "data_seed": ["-1", "18446744073709551616"],
    "dataloader_num_workers": ["-1", "nan", "all", "99999999999999999999"],
    "num_train_epochs": ["0", "-1", "nan", "inf"],
    "max_steps": ["0", "-5", "99999999999999999999"],
    "warmup_steps": ["-1", "nan", "inf"],
    "weight_decay": ["-1", "nan", "inf"],
    "max_grad_norm": ["-1", "nan"],
    "label_smoothing_factor": ["-1", "nan", "2"],
    "adam_beta1": ["-1", "nan", "2"],
    "logging_steps": ["0", "-1", "nan", "inf"],
    "eval_steps": ["0", "-1", "nan"],
    "save_steps": ["0", "-1", "nan"],
    "patience": ["0", "-1"],
    "head_lr": ["0", "-1", "nan", "fast"],
    "head_lr_multiplier": ["0", "nan", "inf"],
    "energy_logging_steps": ["-1"],
    "znorm_refresh_samples": ["-1"],
    "informed_samples": ["0"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in NUMBERS.items() for value in values])
def test_numbers_outside_of_their_domain_are_refused_and_no_folder_appears(
    tmp_path, photos, timm_folder, capsys, name, value
):
    argv = arguments(timm_folder, photos, tmp_path / "out", **{name: value})
    with pytest.raises(SystemExit) as end:
        run_command(finetune.main, argv, "finetune.py")
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("finetune.py: error: ")
    assert name in line
    assert not list(tmp_path.iterdir())


@pytest.mark.runs
@pytest.mark.parametrize(
    "changes",
    [
        {"optim": "sgd", "optim_args": "momentum=fast"},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"per_device_train_batch_size": 1},
        {"data_dir": "/nowhere"},
    ],
    ids=str,
)
def test_what_is_refused_in_a_new_folder_leaves_no_folder(tmp_path, photos, timm_folder, changes):
    refuse(".", arguments(timm_folder, photos, tmp_path / "new" / "out", **changes))
    assert not list(tmp_path.iterdir())


@pytest.mark.runs
@pytest.mark.parametrize("left", [None, "", '{"pid": 1, "host": "gone"}'], ids=["none", "empty", "of a dead run"])
def test_what_is_refused_leaves_the_lock_file_as_it_was(finished, tmp_path, photos, timm_folder, left):
    out = shutil.copytree(finished, tmp_path / "out")
    (out / ".run.lock").unlink()
    if left is not None:
        (out / ".run.lock").write_text(left)
    before = contents(out)
    refuse("optim_args", arguments(timm_folder, photos, out, overwrite=True, optim="sgd", optim_args="momentum=fast"))
    assert contents(out) == before


@pytest.fixture(scope="module")
def finished(tmp_path_factory, photos, timm_folder):
    """The folder of a run that ended, with a file of somebody else."""
    out = tmp_path_factory.mktemp("finished") / "out"
    finetune.main(arguments(timm_folder, photos, out, max_steps=1))
    (out / "notes.txt").write_text("mine")
    return out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_dir": "/nowhere"}, "/nowhere"),
        ({"model_name_or_path": "/nowhere"}, "/nowhere"),
        ({"model_name_or_path": "OUT"}, "--overwrite would remove"),
        ({"report_to": "neptune"}, "pip install neptune"),
        ({"optim_args": "momentum", "optim": "sgd"}, "optim_args"),
        ({"optim_args": "momentum=fast", "optim": "sgd"}, "optim_args"),
        ({"optim": "adamw_bnb_8bit"}, "bitsandbytes"),
        ({"optim": "adafactor", "head_lr": "auto"}, "head_lr"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": '{"min_lr": 1}'}, "lr_scheduler_kwargs"),
        ({"freeze_backbone": True, "head_lr_multiplier": 0}, "head_lr_multiplier"),
        ({"num_labels": 5}, "--num_labels 5"),
        ({"metric_for_best_model": "f2"}, "metric_for_best_model"),
    ],
    ids=str,
)
@pytest.mark.runs
def test_what_is_refused_leaves_the_old_run_as_it_was(finished, photos, timm_folder, changes, message):
    before = contents(finished)
    changes = {name: finished if value == "OUT" else value for name, value in changes.items()}
    refuse(message, arguments(timm_folder, photos, finished, overwrite=True, **changes))
    assert contents(finished) == before


@pytest.mark.parametrize("where", [".", "out", "cat/run/1"])
def test_an_output_folder_in_the_folder_of_the_images_is_refused(tmp_path, photos, timm_folder, where):
    data = shutil.copytree(photos, tmp_path / "data")
    refuse("Give a folder outside it", arguments(timm_folder, data, data / where))
    assert contents(data) == contents(photos)


def test_a_model_that_is_nowhere_is_refused_without_retries(tmp_path, photos, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("The Hub was asked again."))
    refuse("no such folder, and the Hub cannot be reached", arguments("no/where", photos, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_adapted_model_is_refused_before_the_old_run_is_touched(finished, tmp_path, photos):
    model = shutil.copytree(finished, tmp_path / "adapted")
    before = contents(finished)
    refuse("keep", arguments(model, photos, finished, overwrite=True))
    assert contents(finished) == before


@pytest.mark.runs
@pytest.mark.parametrize("error", [RuntimeError, InputError, KeyboardInterrupt])
@pytest.mark.parametrize("is_new", [True, False], ids=["new folder", "overwrite"])
def test_a_first_step_that_fails_leaves_every_file_as_it_was(
    finished, tmp_path, photos, timm_folder, monkeypatch, error, is_new
):
    out, seen = tmp_path / "out" if is_new else finished, []

    def fail(*args, **kwargs):
        seen.extend(path.name for path in out.glob("batch*"))
        raise error("out of memory")

    before = contents(out)
    monkeypatch.setattr("entame_hf.trainer.EntameTrainer.training_step", fail)
    with pytest.raises(error):
        finetune.main(arguments(timm_folder, photos, out, overwrite=True))
    assert sorted(seen) == (["batch.png"] if is_new else ["batch.new.png", "batch.png"])
    left = contents(out)
    # An error of the program leaves the folder that it was to fill.
    left.pop(".run.lock", None), before.pop(".run.lock", None)
    assert left == before


@pytest.mark.runs
def test_another_run_is_not_replaced_unless_asked_for(finished, tmp_path, photos, timm_folder):
    out = shutil.copytree(finished, tmp_path / "out")
    argv = arguments(timm_folder, photos, out, max_steps=1)
    before = contents(out)
    refuse("holds another run .*--resume_from_checkpoint last.*--overwrite", argv)
    assert contents(out) == before
    finetune.main([*argv, "--overwrite", "true", "--entame_method", "mei"])
    assert (out / "notes.txt").read_text() == "mine"
    assert json.loads((out / "config.json").read_text())["entame"]["method"] == "mei"


@pytest.mark.parametrize("kind", ["file", "dangling link", "long name", "below a file", "no permission"])
def test_an_output_folder_that_cannot_be_is_refused(tmp_path, photos, timm_folder, kind):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "dangling link":
        out.symlink_to(tmp_path / "nowhere")
    elif kind == "long name":
        out = tmp_path / ("x" * 300)
    elif kind == "below a file":
        out.write_text("mine")
        out = out / "below"
    else:
        out = Path("/proc/out")
    before = contents(tmp_path)
    refuse("--output_dir .* cannot be written to", arguments(timm_folder, photos, out))
    assert contents(tmp_path) == before


def test_a_size_that_the_model_does_not_take(tmp_path, photos):
    ViTForImageClassification(ViTConfig(**TINY_VIT)).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    refuse("no images of 24×24.*--image_size", arguments(tmp_path / "vit", photos, tmp_path / "out", image_size=24))


def test_weights_in_a_pickle_are_not_loaded(tmp_path, photos, hf_folder):
    shutil.copytree(hf_folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    model = AutoModelForImageClassification.from_pretrained(hf_folder)
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    refuse("safetensors", arguments(tmp_path / "pickled", photos, tmp_path / "out"))


def test_one_class(tmp_path, timm_folder):
    write_images(tmp_path / "photos", {"red": (200, 40, 40)}, count=3)
    refuse("one class", arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))


def test_a_class_that_training_lacks(tmp_path, timm_folder):
    write_images(tmp_path / "photos" / "train", {k: COLOURS[k] for k in ("red", "blue")}, count=4)
    write_images(tmp_path / "photos" / "validation", COLOURS, count=2)
    refuse("green", arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))


def test_a_label_column_that_does_not_exist(tmp_path, timm_folder):
    import datasets

    rows = {"image": [Image.new("RGB", (8, 8))] * 4, "label": ["a", "b"] * 2}
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "data" / "train.parquet")
    argv = arguments(timm_folder, None, tmp_path / "out", dataset_name=tmp_path / "data", label_column_name="kind")
    refuse("kind.*image, label", argv)


def test_too_many_unreadable_images(tmp_path, photos, timm_folder):
    shutil.copytree(photos, tmp_path / "photos")
    for index in range(8):
        (tmp_path / "photos" / "red" / f"{index}.png").write_bytes(b"")
    refuse("At most 1%", arguments(timm_folder, tmp_path / "photos", tmp_path / "out"))


def test_remote_code_does_not_run_unless_asked_for(tmp_path, photos, timm_folder):
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
    refuse("trust_remote_code", arguments(folder, photos, tmp_path / "out"))
    assert not (tmp_path / "ran").exists()
