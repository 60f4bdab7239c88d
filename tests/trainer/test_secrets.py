"""A token is never written, at no moment of a run and by none of its writers, and nothing shows it."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from cli_folders import arguments, photos, timm_folder  # noqa: F401
from conftest import RandomImages
from transformers import TrainerCallback

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.cli import finetune
from entame_hf.cli.loading import training_parser

TOKEN = "hf_SecretSecretSecret"


def holding(folder: Path, secret: str) -> list[str]:
    """List the files that hold a secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if secret.encode() in path.read_bytes()]


def options(folder, **changes):
    defaults = {
        **{"max_steps": 2, "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": True},
        **{"per_device_train_batch_size": 16, "disable_tqdm": True, "load_best_model_at_end": True},
    }
    return EntameTrainingArguments(str(folder), **{**defaults, **changes})


def trainer(args, callbacks=None):
    data = RandomImages(32)
    model = timm.create_model("test_resnet", num_classes=10)
    return EntameTrainer(model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks)


class Looking(TrainerCallback):
    """Look into a folder at every event of a training."""

    def __init__(self, folder):
        self.folder, self.found = folder, []

    def on_step_end(self, *args, **kwargs):
        self.found += holding(self.folder, TOKEN)

    on_save = on_log = on_evaluate = on_train_end = on_step_end


def finish(done):
    done.train()
    done.save_model()
    done.save_state()
    done.save_metrics("eval", done.evaluate())
    done.create_model_card()


@pytest.mark.runs
@pytest.mark.parametrize("where", ["arguments", "environment"])
def test_a_token_is_on_disk_at_no_moment_of_a_run(tmp_path, monkeypatch, where):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    if where == "environment":
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    looking = Looking(tmp_path)

    def watched(write):
        def save(*args, **kwargs):
            # What a run that is killed before or after it leaves.
            looking.on_step_end()
            write(*args, **kwargs)
            looking.on_step_end()

        return save

    for module, name in ((torch, "save"), (safetensors.torch, "save_file")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    token = TOKEN if where == "arguments" else None
    finish(trainer(options(tmp_path, hub_token=token, report_to=["tensorboard"]), [looking]))
    assert any((tmp_path / "logs").iterdir())
    assert (tmp_path / "README.md").is_file()
    assert not looking.found + holding(tmp_path, TOKEN)


def test_a_checkpoint_and_a_model_say_nothing_of_this_machine(tmp_path):
    finish(trainer(options(tmp_path, report_to="none")))
    found = {Path(name).name for name in holding(tmp_path, str(tmp_path))}
    # The state beside the final model is Trainer's, and stays here.
    assert found <= {"trainer_state.json"}
    assert not any(holding(folder, str(tmp_path)) for folder in tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("args", [options, lambda folder, **given: run_arguments(folder, **given)], ids=["own", "run"])
def test_arguments_show_no_token(tmp_path, args):
    given = args(tmp_path, hub_token=TOKEN)
    for shown in (repr(given), str(given), f"{[given]}", given.to_json_string(), str(given.to_dict())):
        assert TOKEN not in shown
        assert "hub_token" in shown
    for clone in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert clone.hub_token == TOKEN


def run_arguments(folder, **given):
    return training_parser("").build({"output_dir": str(folder), **given})[2]


@pytest.mark.runs
def test_a_killed_run_leaves_no_token(tmp_path):
    code = f"""
        import os, sys, torch
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_secrets import Path, TOKEN, options, trainer
        written = torch.save
        def killed(value, file, *args, **kwargs):
            written(value, file, *args, **kwargs)
            if "scheduler" in str(file):
                os.kill(os.getpid(), 9)
        torch.save = killed
        trainer(options("out", hub_token=TOKEN, report_to="none")).train()
    """
    path = os.pathsep.join([str(Path(__file__).parents[1] / part) for part in (".", "cli")] + sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment, check=False)
    assert ended.returncode == -9
    assert (tmp_path / "out" / "checkpoint-1" / "optimizer.pt").is_file()
    assert not holding(tmp_path, TOKEN)


@pytest.mark.runs
def test_a_command_keeps_no_token_from_its_options_or_its_file(tmp_path, photos, timm_folder, capfd):  # noqa: F811
    file = tmp_path / "mine.yaml"
    file.write_text(f"hub_token: {TOKEN}\n")
    out = tmp_path / "out"
    argv = arguments(timm_folder, photos, out, max_steps=2, save_steps=1, report_to="tensorboard", gradio=True)
    finetune.main([str(file), *argv])
    finetune.main(
        [str(out / "run.yaml"), "--hub_token", TOKEN, "--resume_from_checkpoint", "last", "--max_steps", "3"]
    )
    assert (out / "checkpoint-3").is_dir()
    assert not holding(out, TOKEN)
    assert not any(TOKEN in text for text in capfd.readouterr())
