"""From the Hub to the Hub: models and data come from there, and people who know nothing of this load the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import repeat
from pathlib import Path

import datasets
import numpy as np
import pytest
import timm
import torch
from hub_server import LFS_SIZE, WRITE, HubServer
from PIL import Image
from transformers import BitImageProcessor, ViTConfig, ViTForImageClassification

from entame_hf.patch import as_transformers, stock_state_dict

pytestmark = pytest.mark.runs

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"
COLOURS = {"red": (150, 90, 90), "green": (90, 150, 90), "blue": (90, 90, 150)}
# Nothing here is a default of timm's, of transformers' or of one of their processors.
MEAN, STD = [0.4, 0.5, 0.6], [0.3, 0.25, 0.35]


def write_timm_model(folder: Path) -> None:
    wrapper = as_transformers(timm.create_model("resnet14t", num_classes=1000)).train()
    with torch.no_grad():
        for _ in range(20):
            # A pretrained model's running statistics fit its weights.
            wrapper(torch.randn(32, 3, 32, 32))
    changes = {"input_size": (3, 32, 32), "crop_pct": 0.8, "interpolation": "bilinear", "mean": MEAN, "std": STD}
    wrapper.config.pretrained_cfg = {**wrapper.config.pretrained_cfg, **changes}
    wrapper.config.model_args = {}
    wrapper.save_pretrained(folder, state_dict=stock_state_dict(wrapper))


def write_transformers_model(folder: Path) -> None:
    sizes = {"hidden_size": 288, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1152}
    ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, **sizes)).save_pretrained(folder)
    crop = {
        "size": {"shortest_edge": 38},
        "crop_size": {"height": 32, "width": 32},
        "resample": Image.Resampling.BILINEAR,
    }
    BitImageProcessor(image_mean=MEAN, image_std=STD, **crop).save_pretrained(folder)


def write_images(folder: Path) -> None:
    """Write noise around colours that overlap: something to learn, and something to get wrong."""
    generator = np.random.default_rng(0)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLOURS))})
    for split, count in {"train": 32, "validation": 8}.items():
        labels = [name for name in COLOURS for _ in range(count)]
        images = []
        for name in labels:
            pixels = COLOURS[name] + generator.normal(0, 30, 3) + generator.normal(0, 60, (40, 50, 3))
            images.append(Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)))
        rows = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
        rows.to_parquet(folder / f"{split}.parquet")


LOAD_BACK = """
    import sys
    sys.modules["entame_hf"] = None
    import json, logging, warnings
    import timm, torch
    from datasets import load_dataset
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline
    from transformers.utils import logging as transformers_logging
    warnings.simplefilter("error")
    kind = sys.argv[1]
    expected = json.loads(sys.argv[2])
    rows = load_dataset("ada/pictures")["validation"]
    labels = torch.tensor(rows["label"])
    names = rows.features["label"].names
    for where, (loss, accuracy) in expected.items():
        model, report = AutoModelForImageClassification.from_pretrained(where, output_loading_info=True)
        assert not any(report.values()), report
        inputs = AutoImageProcessor.from_pretrained(where)([row["image"] for row in rows], return_tensors="pt")
        with torch.no_grad():
            logits = model.eval()(**inputs).logits
        assert abs(torch.nn.functional.cross_entropy(logits, labels).item() - loss) < 1e-4, where
        classify = pipeline("image-classification", model=where)
        right = [classify(row["image"])[0]["label"] == names[row["label"]] for row in rows]
        assert abs(sum(right) / len(right) - accuracy) < 1e-9, (where, sum(right) / len(right), accuracy)
        if kind == "timm":
            source = "hf-hub" if where == "ada/tuned" else "local-dir"
            stock = timm.create_model(f"{source}:{where}", pretrained=True).eval()
            config = timm.data.resolve_model_data_config(stock)
            transform = timm.data.create_transform(**config, is_training=False)
            with torch.no_grad():
                given = stock(torch.stack([transform(row["image"]) for row in rows]))
            torch.testing.assert_close(given, logits, rtol=0, atol=1e-4)
"""


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "pictures").mkdir()
    write_images(tmp_path / "pictures")
    with HubServer() as server:
        server.add("datasets", "ada/pictures", tmp_path / "pictures")
        yield server


def finetune(folder: Path, hub: HubServer, write_model: Callable[[Path], None], **changes: object):
    """Run the script in a folder, with a model that comes from the Hub."""
    torch.manual_seed(0)
    (folder / "model").mkdir()
    write_model(folder / "model")
    hub.add("models", "ada/base", folder / "model")
    options = {
        "model_name_or_path": "ada/base",
        "dataset_name": "ada/pictures",
        "output_dir": "out",
        "per_device_train_batch_size": 32,
        "learning_rate": 1e-3,
        "hub_model_id": "ada/tuned",
        "hub_private_repo": True,
        "push_to_hub": True,
        "use_cpu": True,
        **changes,
    }
    command = [
        sys.executable,
        SCRIPT,
        *(str(part) for name, value in options.items() for part in (f"--{name}", value)),
    ]
    environment = {**os.environ, **hub.environment(folder / "home")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("kind", "write_model"),
    [("timm", write_timm_model), pytest.param("transformers", write_transformers_model, marks=pytest.mark.slow)],
)
def test_from_the_hub_to_the_hub(tmp_path, hub, kind, write_model):
    best = {"metric_for_best_model": "accuracy", "load_best_model_at_end": True}
    run = finetune(tmp_path, hub, write_model, num_train_epochs=3, hub_strategy="checkpoint", **best)
    assert run.returncode == 0, run.stderr

    repo = hub.repos["models", "ada/tuned"]
    assert repo.private
    files = repo.files()
    assert len(files["model.safetensors"]) > 20_000_000 > LFS_SIZE
    shared = {"README.md", "config.json", "model.safetensors", "eval_results.json", "all_results.json"}
    assert shared <= {name for name in files if "/" not in name}
    assert not {"trainer_state.json", "training_args.bin", "entame_head.safetensors"} & set(files)
    assert "last-checkpoint/optimizer.pt" in files
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", files["README.md"].decode())
    assert pictures
    assert set(pictures) <= set(files)

    results = json.loads(files["eval_results.json"])
    history = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]
    # The last step's is evaluated twice: as a checkpoint, and with the best model at the end.
    steps = {entry["step"]: entry for entry in reversed(history) if "eval_accuracy" in entry}
    saved = {f"out/checkpoint-{step}": steps[step] for step in steps if (tmp_path / f"out/checkpoint-{step}").exists()}
    assert len(saved) == 2
    expected = {**saved, "out": results, "ada/tuned": results}
    figures = {where: (entry["eval_loss"], entry["eval_accuracy"]) for where, entry in expected.items()}
    loading = [sys.executable, "-I", "-c", textwrap.dedent(LOAD_BACK), kind, json.dumps(figures)]
    clean = {**os.environ, **hub.environment(tmp_path / "elsewhere")}
    loaded = subprocess.run(loading, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert 0.4 < results["eval_accuracy"] < 1

    for secret in (str(tmp_path), WRITE):
        assert secret not in run.stdout + run.stderr
        assert secret.encode() not in b"".join(hub.received)


@pytest.mark.slow
def test_a_push_that_fails_ends_with_1_and_one_command_makes_up_for_it(tmp_path, hub):
    hub.faults["commit"] = repeat(403)
    run = finetune(tmp_path, hub, write_transformers_model, max_steps=1)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert "Nothing is lost" in run.stderr
    assert set(hub.repos["models", "ada/tuned"].files()) == {".gitattributes"}
    for secret in (str(tmp_path), WRITE):
        assert secret not in run.stdout + run.stderr
    hub.faults.clear()
    command = run.stderr.strip().splitlines()[-1].rpartition("who may write there: ")[2]
    environment = {**os.environ, **hub.environment(tmp_path / "home")}
    subprocess.run(command, shell=True, cwd=tmp_path, env=environment, check=True)
    files = hub.repos["models", "ada/tuned"].files()
    assert {"README.md", "config.json", "preprocessor_config.json", "eval_results.json"} <= set(files)
    assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
