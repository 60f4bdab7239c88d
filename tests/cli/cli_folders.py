"""Photos, pretrained models and options that tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

from entame_hf.patch import as_transformers, stock_state_dict

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def write_images(folder: Path, classes: dict[str, tuple[int, int, int]], count: int, side: int = 40) -> None:
    """Write noise around a colour, one a class: something to learn."""
    generator = np.random.default_rng(0)
    for name, colour in classes.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = np.clip(np.array(colour) + generator.normal(0, 40, (side, side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    write_images(folder, COLOURS, count=40)
    return folder


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("transformers_model")
    torch.manual_seed(0)
    config = ResNetConfig(num_labels=1000, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    ResNetForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def arguments(model: Path | None, data: Path | None, out: Path, **changes) -> list[str]:
    """Write the options of a short run on the CPU."""
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


def contents(folder: Path) -> dict[str, bytes]:
    """Read every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
