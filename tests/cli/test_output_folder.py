"""The folder of a run: what is written there, whole, and from what it can be resumed."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from cli_folders import arguments, contents, photos, timm_folder  # noqa: F401
from transformers import AutoModelForImageClassification

from entame_hf import RunError
from entame_hf.cli import finetune
from entame_hf.cli.output_folder import save_options, save_results, write_text


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageClassification.from_pretrained(folder).state_dict()


@pytest.mark.runs
def test_a_run_is_resumed_from_its_own_file(tmp_path, photos, timm_folder, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    argv = arguments(timm_folder, photos, Path("whole"), learning_rate=1e-3, patience=5)
    finetune.main(argv)
    shutil.copytree("whole", "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "half" / "checkpoint-14")
    file = tmp_path / "half" / "run.yaml"
    file.write_text(file.read_text().replace(str(tmp_path / "whole"), str(tmp_path / "half")))
    # From another folder: the paths of the file are absolute.
    monkeypatch.chdir("/")
    finetune.main([str(file), "--resume_from_checkpoint", "last"])
    torch.testing.assert_close(weights_of(tmp_path / "half"), weights_of(tmp_path / "whole"), rtol=0, atol=0)
    # Options take precedence over the file: the same run, an epoch longer.
    finetune.main([str(file), "--resume-from-checkpoint", "last", "--num_train_epochs", "3"])
    assert json.loads((tmp_path / "half" / "trainer_state.json").read_text())["global_step"] == 21
    assert yaml.safe_load(file.read_text())["num_train_epochs"] == 3


def test_a_file_of_options_holds_no_secret_and_no_order_of_one_start(tmp_path):
    options = {
        "hub_token": "hf_secret",
        "overwrite": True,
        "resume_from_checkpoint": "last",
        "seed": 1,
        "patience": None,
    }
    save_options(tmp_path, options)
    assert yaml.safe_load((tmp_path / "run.yaml").read_text()) == {"seed": 1}
    assert "secret" not in (tmp_path / "run.yaml").read_text()


def test_results_of_splits_are_kept_together(tmp_path):
    save_results(tmp_path, "eval", {"eval_accuracy": 0.5})
    save_results(tmp_path, "test", {"test_accuracy": 0.25})
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_accuracy": 0.5, "test_accuracy": 0.25}
    assert json.loads((tmp_path / "test_results.json").read_text()) == {"test_accuracy": 0.25}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, code):
    (tmp_path / "a.json").write_text("old")

    def write(path, *args, **kwargs):
        path.write_bytes(b"half")
        raise OSError(code, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(RunError, match=r"a\.json could not be written \(No space left on device\)"):
        write_text(tmp_path / "a.json", "new")
    assert contents(tmp_path) == {"a.json": b"old"}


def test_a_full_disk_at_the_end_is_one_line(tmp_path, photos, timm_folder, monkeypatch):  # noqa: F811
    written = Path.write_text

    def write(path, *args, **kwargs):
        if "_results" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, *args, **kwargs)

    argv = arguments(timm_folder, photos, tmp_path / "out", max_steps=1)
    monkeypatch.setattr(Path, "write_text", write)
    with pytest.raises(RunError, match=r"_results\.json could not be written .*--resume_from_checkpoint last"):
        finetune.main(argv)
    assert (tmp_path / "out" / "checkpoint-1").is_dir()
