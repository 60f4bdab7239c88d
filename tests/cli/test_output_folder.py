"""The folder of a run: what is written there, whole, and from what it can be resumed."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import yaml
from cli_folders import arguments, contents, photos, timm_folder  # noqa: F401
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, TrainerControl, TrainerState

from entame_hf import InputError, RunError
from entame_hf.cli import finetune, predict
from entame_hf.cli.output_folder import ClaimFolder, save_options
from entame_hf.files import write_text
from entame_hf.trainer import EntameTrainer


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageClassification.from_pretrained(folder).state_dict()


@pytest.mark.runs
def test_a_copied_run_is_resumed_where_its_own_file_lies(
    tmp_path,
    photos,  # noqa: F811
    timm_folder,  # noqa: F811
    monkeypatch,
    caplog,
):
    monkeypatch.chdir(tmp_path)
    argv = arguments(timm_folder, photos, Path("whole"), learning_rate=1e-3, patience=5)
    finetune.main(argv)
    shutil.copytree("whole", "half")
    before = contents(tmp_path / "whole")
    (tmp_path / "half" / "model.safetensors").unlink()
    shutil.rmtree(tmp_path / "half" / "checkpoint-14")
    file = tmp_path / "half" / "run.yaml"
    # From another folder: the paths of the file are absolute.
    monkeypatch.chdir("/")
    finetune.main([str(file), "--resume_from_checkpoint", "last"])
    torch.testing.assert_close(weights_of(tmp_path / "half"), weights_of(tmp_path / "whole"), rtol=0, atol=0)
    assert f"{file} was moved from {tmp_path / 'whole'}: the run writes to {tmp_path / 'half'}" in caplog.text
    assert contents(tmp_path / "whole") == before
    # Options take precedence over the file: the same run, an epoch longer.
    finetune.main([str(file), "--resume-from-checkpoint", "last", "--num_train_epochs", "3"])
    assert json.loads((tmp_path / "half" / "trainer_state.json").read_text())["global_step"] == 21
    assert yaml.safe_load(file.read_text())["num_train_epochs"] == 3


@pytest.mark.runs
def test_a_moved_run_is_not_started_in_its_old_place(tmp_path, photos, timm_folder):  # noqa: F811
    finetune.main(arguments(timm_folder, photos, tmp_path / "old", max_steps=1))
    shutil.move(tmp_path / "old", tmp_path / "new")
    before = contents(tmp_path)
    with pytest.raises(InputError, match=f"--output_dir {tmp_path / 'new'} holds another run"):
        finetune.main([str(tmp_path / "new" / "run.yaml")])
    assert contents(tmp_path) == before
    # A copy of the file alone, and a folder that is named, are no moved runs.
    shutil.copy(tmp_path / "new" / "run.yaml", tmp_path / "run.yaml")
    finetune.main([str(tmp_path / "run.yaml")])
    finetune.main([str(tmp_path / "new" / "run.yaml"), "--output_dir", str(tmp_path / "third")])
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "third", "run.yaml"}


@pytest.mark.runs
def test_a_run_is_resumed_into_another_folder_and_says_which_weights_it_has(
    tmp_path,
    photos,  # noqa: F811
    timm_folder,  # noqa: F811
    capsys,
):
    # No evaluation is better than the first one.
    argv = arguments(timm_folder, photos, tmp_path / "a", learning_rate=1e-20, freeze_backbone=True)
    finetune.main(argv)
    again = [*argv, "--num_train_epochs", "3", "--resume_from_checkpoint", str(tmp_path / "a" / "checkpoint-14")]
    finetune.main([*again, "--output_dir", str(tmp_path / "b")])
    assert "the best ones, of epoch 1 (step 7)" in capsys.readouterr().out
    before = contents(tmp_path / "b")
    with pytest.raises(InputError, match=r"b holds another run .*--overwrite"):
        finetune.main([*again, "--output_dir", str(tmp_path / "b")])
    assert contents(tmp_path / "b") == before
    (tmp_path / "b" / "checkpoint-99").mkdir()
    finetune.main([*again, "--output_dir", str(tmp_path / "b"), "--overwrite"])
    assert [path.name for path in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-21"]
    # The best checkpoint is not beside this one.
    capsys.readouterr()
    finetune.main([str(tmp_path / "b" / "run.yaml"), "--resume_from_checkpoint", "last", "--num_train_epochs", "4"])
    assert "the last ones, of step 28" in capsys.readouterr().out


@pytest.mark.runs
def test_a_training_batch_is_shown_before_the_first_step(
    tmp_path,
    photos,  # noqa: F811
    timm_folder,  # noqa: F811
    monkeypatch,
    capsys,
):
    out, step, shown = tmp_path / "out", EntameTrainer.training_step, []

    def training_step(self, *args, **kwargs):
        shown.append({path.name: path.read_bytes() for path in out.glob("*batch*")})
        return step(self, *args, **kwargs)

    monkeypatch.setattr(EntameTrainer, "training_step", training_step)
    finetune.main(arguments(timm_folder, photos, out, max_steps=1))
    first = (out / "batch.png").read_bytes()
    assert shown.pop() == {"batch.png": first}
    assert f"\nBatch: {out / 'batch.png'} shows training images" in capsys.readouterr().out

    options = {"max_steps": 2, "save_steps": 1, "seed": 1, "overwrite": True}
    finetune.main(arguments(timm_folder, photos, out, **options))
    second = (out / "batch.png").read_bytes()
    assert first != second
    assert shown == [{"batch.png": first, "batch.new.png": second}, {"batch.png": second}]
    assert f"{out / 'batch.new.png'} (batch.png after the first step)" in capsys.readouterr().out

    shutil.rmtree(out / "checkpoint-2")
    finetune.main([str(out / "run.yaml"), "--resume_from_checkpoint", "last"])
    assert shown[-1] == {"batch.png": second}
    assert "Batch:" not in capsys.readouterr().out


def test_the_picture_of_an_old_run_goes_if_the_new_one_has_none(tmp_path):
    (tmp_path / "batch.png").touch()
    claim = ClaimFolder(tmp_path, {})
    args = SimpleNamespace(resume_from_checkpoint=None, world_size=1)
    with claim.batch_shown(lambda file: False) as batch_file:
        assert batch_file is None
        assert (tmp_path / "batch.png").exists()
        claim.on_step_end(args, TrainerState(is_world_process_zero=True), TrainerControl())
    assert list(contents(tmp_path)) == ["run.yaml"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.runs
def test_the_final_weights_are_saved_in_the_dtype_asked_for(tmp_path, photos, timm_folder, dtype):  # noqa: F811
    out = tmp_path / "out"
    finetune.main(arguments(timm_folder, photos, out, max_steps=2, save_steps=1, save_dtype=dtype))
    kinds = {name: str(tensor.dtype) for name, tensor in load_file(out / "model.safetensors").items()}
    assert {kind for name, kind in kinds.items() if "weight" in name} == {f"torch.{dtype}"}
    assert {kind for name, kind in kinds.items() if "running" in name} == {"torch.float32"}
    exact = load_file(out / "checkpoint-2" / "model.safetensors")
    assert not {tensor.dtype for tensor in exact.values()} & {torch.bfloat16, torch.float16}
    assert str(AutoModelForImageClassification.from_pretrained(out).dtype) == f"torch.{dtype}"
    loaded = timm.create_model(f"local-dir:{out}", pretrained=True).state_dict()
    torch.testing.assert_close(loaded, exact, rtol=2.0**-8, atol=1e-5)
    assert ("evaluated in float32" in (out / "README.md").read_text()) == (dtype != "float32")
    predict.main([str(out), str(photos), "--output", str(tmp_path / "predictions.csv"), "--use_cpu"])
    finetune.main([str(out / "run.yaml"), "--resume_from_checkpoint", "last", "--max_steps", "3"])
    assert (out / "checkpoint-3").is_dir()


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


@pytest.mark.runs
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


def test_only_what_a_run_wrote_is_replaced(tmp_path):
    kept = {"checkpoint-1-keep", "checkpoint-best-7", "checkpoint-notes.txt", "checkpoint-3.txt", "notes"}
    for name in ("checkpoint-1", "checkpoint-20", *kept):
        (tmp_path / name).mkdir()
    (tmp_path / "model.safetensors").touch()
    args = SimpleNamespace(resume_from_checkpoint=None, output_dir=str(tmp_path), world_size=1)
    ClaimFolder(tmp_path, {}).on_step_end(args, TrainerState(is_world_process_zero=True), TrainerControl())
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", *kept}
