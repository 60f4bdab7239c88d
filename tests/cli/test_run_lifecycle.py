"""The life of a run of the command: resumed as what it was, stopped where numbers are none, alone in its folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml
from cli_folders import arguments, contents, hf_folder, photos, timm_folder  # noqa: F401

from entame_hf import InputError, NonFiniteError
from entame_hf.cli import finetune
from entame_hf.cli.console import Console

pytestmark = pytest.mark.runs

# Fixtures.
# ruff: noqa: F811


@pytest.fixture(scope="module")
def finished(tmp_path_factory, photos, timm_folder):
    out = tmp_path_factory.mktemp("finished") / "out"
    finetune.main(arguments(timm_folder, photos, out, num_train_epochs=1, image_size=32))
    return out


def renamed(photos, folder):
    shutil.copytree(photos, folder)
    (folder / "red").rename(folder / "crimson")
    return folder


def with_a_class_more(photos, folder):
    shutil.copytree(photos, folder)
    shutil.copytree(folder / "red", folder / "yellow")
    return folder


def with_an_image_more(photos, folder):
    shutil.copytree(photos, folder)
    shutil.copy(folder / "red" / "0.png", folder / "red" / "100.png")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "classes: 1 is green in the checkpoint, crimson in this run"),
        (with_a_class_more, r"classes: 3 in the checkpoint, 4 in this run \(such as yellow\)"),
        (with_an_image_more, "training examples"),
        ({"seed": 7}, "training examples: .* in both, but others"),
        ({"test_fraction": 0.5}, "training examples: 102 in the checkpoint, 60 in this run"),
        ({"image_size": 24}, "images: 32 × 32 px.* in the checkpoint, 24 × 24 px"),
        ({"normalization": "dataset"}, "images: .*scaled by"),
        ({"optim": "sgd"}, "optimizer: AdamW in the checkpoint, SGD in this run"),
        ({"model_name_or_path": "OTHER"}, "model: test_resnet in the checkpoint, ResNet"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:30]) if not isinstance(value, str) else "",
)
def test_another_training_is_not_resumed(tmp_path, photos, timm_folder, hf_folder, finished, change, message):
    data = change(photos, tmp_path / "photos") if callable(change) else photos
    options = {"image_size": 32, **({} if callable(change) else change)}
    model = hf_folder if options.pop("model_name_or_path", None) else timm_folder
    before = contents(finished)
    argv = arguments(model, data, finished, num_train_epochs=2, resume_from_checkpoint="last", **options)
    with pytest.raises(InputError, match=message):
        finetune.main(argv)
    assert contents(finished) == before


def test_the_same_images_in_another_folder_are_resumed_and_what_was_used_is_recorded(
    tmp_path, photos, timm_folder, finished, caplog
):
    out = shutil.copytree(finished, tmp_path / "out")
    data = shutil.copytree(photos, tmp_path / "photos")
    options = {"num_train_epochs": 2, "image_size": 32, "learning_rate": 0.5, "augmentation": "none"}
    finetune.main(arguments(timm_folder, data, out, resume_from_checkpoint="last", **options))
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 14
    assert "`learning_rate=0.0001` (not 0.5)" in caplog.text
    assert "`num_train_epochs=2.0` (before: 1.0)" in caplog.text
    assert "`augmentation=none` (before: flip)" in caplog.text
    assert yaml.safe_load((out / "run.yaml").read_text())["learning_rate"] == 1e-4
    assert json.loads((out / "config.json").read_text())["entame"]["learning_rate"] == 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 1e30},
        {"learning_rate": 1e30, "optim": "sgd"},
        # Loss and weights are finite, and only the evaluation is not: in the training, and after it.
        {"learning_rate": 1e15, "max_steps": 1},
        {"learning_rate": 1e15, "max_steps": 1, "eval_strategy": "no"},
    ],
    ids=str,
)
def test_a_run_whose_numbers_are_none_writes_no_model_and_no_card(tmp_path, photos, timm_folder, options):
    with pytest.raises(NonFiniteError, match="after step"):
        finetune.main(arguments(timm_folder, photos, tmp_path / "out", **options))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert not names & {"model.safetensors", "README.md", "all_results.json", "config.json"}


@pytest.mark.parametrize("how", [{"overwrite": True}, {"resume_from_checkpoint": "last"}], ids=str)
def test_a_folder_in_use_is_refused_by_process_and_host(photos, timm_folder, finished, how):
    code = f"from entame_hf.trainer import locked_output_dir\nwith locked_output_dir({str(finished)!r}):\n"
    code += "    print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        before = contents(finished)
        with pytest.raises(InputError, match=rf"in use by process {other.pid} on \S+"):
            finetune.main(arguments(timm_folder, photos, finished, num_train_epochs=2, image_size=32, **how))
        assert contents(finished) == before
        other.kill()
    # The next run is not kept out by what the killed one has left.
    (finished / ".run.lock").write_text("")


@pytest.mark.parametrize(
    ("event", "step", "message"),
    [
        ("on_train_begin", 0, "No step was taken"),
        ("on_step_end", 1, "no checkpoint yet.*\n  entame finetune .*run.yaml --overwrite$"),
        ("on_step_end", 9, "Resume with:\n  entame finetune .*run.yaml --resume_from_checkpoint last$"),
    ],
)
def test_an_interrupted_run_says_what_to_type(tmp_path, monkeypatch, photos, timm_folder, event, step, message):
    def stop(self, args, state, control, **kwargs):
        if state.global_step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, event, stop)
    with pytest.raises(KeyboardInterrupt, match=message):
        finetune.main(arguments(timm_folder, photos, tmp_path / "out", image_size=32))


@pytest.mark.parametrize(("best", "step"), [("false", None), ("true", 7)], ids=["last", "first"])
def test_the_end_says_from_which_step_a_run_is_continued(tmp_path, photos, timm_folder, capsys, best, step):
    """Of a strategy that saves the best alone; the loss falls."""
    options = {"save_strategy": "best", "metric_for_best_model": "loss", "greater_is_better": best}
    finetune.main(arguments(timm_folder, photos, tmp_path / "out", learning_rate=1e-3, **options))
    printed = capsys.readouterr().out
    assert "--resume_from_checkpoint last --num_train_epochs 4" in printed
    assert ("from the last checkpoint, of step 7" in printed) == (step == 7)
    assert ("from the last checkpoint" in printed) == (step is not None)
