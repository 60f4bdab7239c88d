"""A run says what it understood of a dataset once, whoever asks, and names each image that it does not use."""

import csv
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from cli_folders import SCRIPT, photos, timm_folder  # noqa: F401
from conftest import launch_by
from PIL import Image

from entame_hf.cli import finetune, inspect

pytestmark = pytest.mark.runs


def image(seed: int) -> bytes:
    buffer = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images of each kind that is left out: without labels, beside classes, broken, in two splits, too many."""
    files = {f"train/{name}/{i}.png": image(100 * n + i) for n, name in enumerate(("cat", "dog")) for i in range(12)}
    files |= {
        f"val/{name}/{i}.png": image(300 + 100 * n + i) for n, name in enumerate(("cat", "dog")) for i in range(4)
    }
    files |= {"val/cat/same.png": image(103), "train/cat/broken.png": b"<html>", "train/cover.png": image(1000)}
    files |= {f"unlabeled/{i}.png": image(2000 + i) for i in range(3)}
    for name, content in files.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(content)
    return tmp_path / "data"


def options(model: Path, data: Path, out: Path) -> list[str]:
    given = {"model_name_or_path": model, "data_dir": data, "output_dir": out, "num_train_epochs": 2, "image_size": 16}
    given |= {"max_eval_samples": 8, "per_device_train_batch_size": 4, "report_to": "none"}
    return [str(part) for name, value in given.items() for part in (f"--{name}", value)]


def understood(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("Splits:", "Classes:", "Images a class", "Note:"))]


def test_inspecting_and_training_say_the_same(tmp_path, folder, timm_folder, capsys):  # noqa: F811
    said = []
    out = tmp_path / "out"
    for command, more in ((inspect.main, []), (finetune.main, ["--inspect"]), (finetune.main, [])):
        command([*options(timm_folder, folder, out), *more])
        said.append(understood(capsys.readouterr().out))
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == len(set(said[0])) == 3 + 4
    assert sum("in train too" in line for line in said[0]) == 1
    check_all_named(folder, out)


def check_all_named(folder: Path, out: Path) -> None:
    """Check that each image is used, or named with its reason."""
    with (out / "skipped_images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    reasons = {Path(row["image"]).relative_to(folder).as_posix(): row["reason"] for row in rows}
    assert len(rows) == len(reasons)
    undrawn = {name for name, reason in reasons.items() if reason == "not drawn, max_eval_samples=8"}
    assert len(undrawn) == 1
    assert all(name.startswith("val/") for name in undrawn)
    assert {name: reason for name, reason in reasons.items() if name not in undrawn} == {
        "train/cat/broken.png": "not an image, or of an unknown format",
        "train/cover.png": "beside the class folders",
        **{f"unlabeled/{i}.png": "no labels" for i in range(3)},
    }


@pytest.mark.parametrize("stops", [False, True], ids=["one_image", "most_of_a_class"])
def test_two_ranks_say_it_once_and_count_for_the_job(tmp_path, folder, timm_folder, stops):  # noqa: F811
    out = tmp_path / "out"
    for i in range(6 * stops):
        (folder / "train" / "owl").mkdir(exist_ok=True)
        (folder / "train" / "owl" / f"{i}.png").write_bytes(b"<html>" if i % 3 else image(700 + i))
    given = [*options(timm_folder, folder, out), "--use_cpu", "--image_cache_gb", "0.00001"]
    run = launch_by("cpu", "--num_processes", "2", str(SCRIPT), *given, OMP_NUM_THREADS="1")
    text = run.stdout + run.stderr
    if not stops:
        assert run.returncode == 0, text[-3000:]
        assert len(understood(run.stdout)) == 3 + 4
        assert text.count("Skipping an image that cannot be read:") == 1
        assert text.count("The image cache has room for") == 2
        assert "train: 1 of 25 images could not be read" in run.stdout
        check_all_named(folder, out)
    else:
        assert run.returncode != 0
        assert "4 of 6 images of class 'owl' cannot be read" in text
