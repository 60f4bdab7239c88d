"""What cannot be written or read is one line: odd output folders, damaged heads and configs."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from conftest import RandomImages
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, TrainerState

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError, RunError


def build(folder, model="test_resnet", **changes):
    torch.manual_seed(0)
    options = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 16, "disable_tqdm": True, **changes}
    args = EntameTrainingArguments(str(folder), use_cpu=True, report_to="none", **options)
    return EntameTrainer(timm.create_model(model, num_classes=10), args, train_dataset=RandomImages(48))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    build(folder).train()
    return folder / "checkpoint-1"


@pytest.mark.parametrize("kind", ["file", "dangling link", "long name", "below a file"])
def test_an_output_folder_that_cannot_be_made_is_refused(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "dangling link":
        out.symlink_to(tmp_path / "nowhere")
    elif kind == "long name":
        out = tmp_path / ("x" * 300)
    else:
        out.write_text("mine")
    with pytest.raises(InputError, match=r"`output_dir=.*` cannot be written to"):
        build(out / "below" if kind == "below a file" else out)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_metrics_and_state_are_written_whole_or_not_at_all(tmp_path, monkeypatch, code):
    trainer = build(tmp_path)
    trainer.save_metrics("eval", {"eval_accuracy": 0.5})
    trainer.save_metrics("test", {"test_accuracy": 0.25})
    trainer.save_state()
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_accuracy": 0.5, "test_accuracy": 0.25}
    assert json.loads((tmp_path / "test_results.json").read_text()) == {"test_accuracy": 0.25}
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}

    def write(path, *args, **kwargs):
        Path(path).write_bytes(b"half")
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(TrainerState, "save_to_json", lambda self, path: write(path))
    for save in (lambda: trainer.save_metrics("eval", {"eval_accuracy": 1.0}), trainer.save_state):
        with pytest.raises(RunError, match=r"\.json could not be written") as error:
            save()
        assert "\n" not in str(error.value)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def half(owner, name, place):
    """Make a method write half of a file, and fail as it does on a full disk."""

    def write(*args, **kwargs):
        Path(args[place]).write_text("half", encoding="utf-8")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[place]))

    return lambda monkeypatch: monkeypatch.setattr(owner, name, write)


@pytest.mark.runs
@pytest.mark.parametrize(
    "fail",
    [
        half(safetensors.torch, "save_file", 1), half(Path, "write_bytes", 0), half(Figure, "savefig", 1),
        half(Image.Image, "save", 1), half(PretrainedConfig, "to_json_file", 1),
    ],
    ids=["head", "card", "picture", "example", "config"],
)  # fmt: skip
def test_a_full_disk_at_the_end_leaves_every_file_of_before(tmp_path, monkeypatch, fail):
    trainer = build(tmp_path)
    trainer.eval_dataset = RandomImages(8)
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    before = {path.name: path.stat().st_size for path in tmp_path.iterdir() if path.is_file()}
    assert {"model.safetensors", "README.md", "error_energy.png", "example_1.png"} <= before.keys()
    fail(monkeypatch)
    with suppress(RunError):
        trainer.save_model()
    trainer.create_model_card()
    # safetensors orders its metadata by chance.
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir() if path.is_file()} == before
    assert not list(tmp_path.glob(".*draft*"))


@pytest.mark.parametrize("text", ["", "null", "[1]", "{"])
def test_damaged_results_of_before_stop_no_run(tmp_path, caplog, text):
    trainer = build(tmp_path)
    (tmp_path / "all_results.json").write_text(text)
    trainer.save_metrics("eval", {"eval_accuracy": 0.5})
    assert json.loads((tmp_path / "all_results.json").read_text()) == {"eval_accuracy": 0.5}
    assert "all_results.json is damaged: it is written anew" in caplog.text


@pytest.mark.parametrize(
    "provenance",
    [
        "null", '{"facts": 3, "options": {}}', '{"facts": {}, "options": {"lr_scheduler_type": 3}}',
        '{"facts": {}, "options": {"learning_rate": "fast"}}', '{"facts": {"classes": 4}, "options": {}}',
    ],
)  # fmt: skip
def test_an_odd_record_of_what_a_checkpoint_was_trained_on_is_one_line(tmp_path, checkpoint, provenance):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    (folder / "checkpoint_files.json").unlink()
    (folder / "trained_on.json").write_text(provenance)
    with pytest.raises(InputError, match=r"trained_on\.json is damaged|was trained on something else"):
        build(tmp_path / "out").train(resume_from_checkpoint=str(folder))


def odd_head(folder, metadata, keep=lambda name: True):
    tensors = load_file(folder / "entame_head.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if keep(name)}
    save_file(tensors, folder / "entame_head.safetensors", metadata=metadata)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: odd_head(folder, None),
        lambda folder: odd_head(folder, {"entame": "null"}),
        lambda folder: odd_head(folder, {"entame": '{"init": 3}'}),
        lambda folder: odd_head(folder, {"entame": '{"phi_w": "much"}'}),
        lambda folder: (folder / "config.json").write_text("null"),
        lambda folder: (folder / "config.json").write_text('{"entame": 3}'),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: (folder / "model.safetensors").unlink() or save_file({}, folder / "model.safetensors"),
    ],
    ids=["no metadata", "null", "wrong type", "wrong value", "null config", "odd record", "no JSON", "no tensors"],
)
def test_damaged_heads_configs_and_weights_are_one_line(tmp_path, checkpoint, damage):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    (folder / "checkpoint_files.json").unlink()
    damage(folder)
    with pytest.raises(InputError, match="cannot be resumed from") as error:
        build(tmp_path / "out").train(resume_from_checkpoint=str(folder))
    assert "\n" not in str(error.value)


def test_a_head_that_lacks_a_tensor_is_one_line(tmp_path, checkpoint):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    (folder / "checkpoint_files.json").unlink()
    with_metadata = {"entame": json.dumps(build(tmp_path / "out").entame_config().to_dict())}
    odd_head(folder, with_metadata, keep=lambda name: not name.endswith("bias"))
    with pytest.raises(InputError, match="cannot be resumed from"):
        build(tmp_path / "out").train(resume_from_checkpoint=str(folder))


def test_a_checkpoint_of_another_model_is_one_line_where_it_does_not_say_so(tmp_path, checkpoint):
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    for name in ("checkpoint_files.json", "trained_on.json"):
        (folder / name).unlink()
    with pytest.raises(InputError, match="cannot be resumed from"):
        build(tmp_path / "out", "test_efficientnet").train(resume_from_checkpoint=str(folder))
