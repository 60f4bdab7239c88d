"""The source task of drawn images, and models pretrained on it."""

import json

import pretrain
import pytest
import torch
from reproduction.source_task import CLASSES, SIDE, SourceTask, all_shapes, fractal_shapes
from reproduction.sources import load_model

pytestmark = pytest.mark.reproduction
CPU = torch.device("cpu")


def batch_of(task, indices, epoch=0):
    return task.finish(task.read(indices, epoch, CPU), CPU)


def test_classes_have_different_shapes():
    shapes = all_shapes(0, CPU)
    assert shapes.shape == (CLASSES, 16, SIDE, SIDE)
    inked = (shapes > 127).sum((2, 3))
    assert inked.min() > 50
    assert inked.max() < SIDE * SIDE / 2
    flat = shapes.flatten(1).float()
    apart = torch.cdist(flat, flat) + torch.eye(CLASSES) * 1e9
    # A font misses a glyph by drawing its box, the same for all that it misses.
    assert apart.min() > 1000


def test_seed_decides_the_fractals():
    assert torch.equal(fractal_shapes(seed=0), all_shapes(0, CPU)[-50:])
    assert not torch.equal(all_shapes(1, CPU)[-50:], all_shapes(0, CPU)[-50:])


def test_images_differ_by_epoch_and_repeat_by_seed():
    first, again, later, other = (
        batch_of(SourceTask(1000, seed), list(range(200)), epoch) for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert torch.equal(first["pixel_values"], again["pixel_values"])
    assert not torch.equal(first["pixel_values"], later["pixel_values"])
    assert not torch.equal(first["pixel_values"], other["pixel_values"])
    assert first["labels"].bincount().tolist() == [2] * CLASSES


def test_evaluation_images_differ_from_training_and_stay():
    train, test = SourceTask(100), SourceTask(100, evaluation=True)
    images = [batch_of(task, [3, 4], epoch)["pixel_values"] for task, epoch in ((train, 0), (test, 0), (test, 5))]
    assert not torch.equal(images[0], images[1])
    assert torch.equal(images[1], images[2])


def test_images_are_normalised():
    images = batch_of(SourceTask(500), list(range(500)))["pixel_values"]
    assert images.shape == (500, 3, SIDE, SIDE)
    assert images.min() == -1
    assert images.max() == 1
    assert images.mean().abs() < 0.3
    assert 0.4 < images.std() < 0.8


def run(monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["pretrain.py", *map(str, options)])
    pretrain.main()


@pytest.mark.parametrize("name", ["test_resnet", "test_vit"])
def test_pretrained_model_is_a_source(name, tmp_path, monkeypatch, capsys):
    options = ("--model", name, "--output_dir", tmp_path / "source", "--steps", 2, "--batch", 8)
    monkeypatch.setattr(pretrain, "TEST_SIZE", 100)
    run(monkeypatch, *options)
    record = json.loads((tmp_path / "source" / "pretraining.json").read_text())
    assert 0 <= record["source_accuracy"] < 0.2
    assert record["steps"] == 2
    model = load_model(str(tmp_path / "source"), 10)
    assert model.config.pretrained_cfg["input_size"] == [3, SIDE, SIDE]
    assert model(torch.zeros(2, 3, SIDE, SIDE)).logits.shape == (2, 10)
    with pytest.raises(SystemExit):
        run(monkeypatch, *options)
    assert "holds a model already" in capsys.readouterr().err


def test_unknown_architecture_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model", "resnet_50", "--output_dir", tmp_path)
    assert "timm.list_models" in capsys.readouterr().err


@pytest.mark.slow
def test_task_is_learnt(tmp_path, monkeypatch):
    options = ("--model", "test_resnet", "--output_dir", tmp_path, "--steps", 300, "--batch", 64)
    run(monkeypatch, *options, "--learning_rate", 3e-3)
    # Chance is 0.01.
    assert json.loads((tmp_path / "pretraining.json").read_text())["source_accuracy"] > 0.08
