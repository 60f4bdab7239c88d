"""A training gets the same batches whoever decodes them, in every run, and again where it resumes."""

import os
import subprocess
import sys
import time
import weakref
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import RandomImages
from PIL import Image
from torch.utils.data import Subset
from transformers import ViTImageProcessor

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.data import Augmentation, ClassificationDataset, Preparation, set_image_size
from entame_hf.data.batches import batch_loader
from entame_hf.data.cache import ImageCache

PROCESSOR = set_image_size(ViTImageProcessor(), 32)
CPU = torch.device("cpu")


def table_of(folder):
    """Table of a folder of images, a folder a class."""
    paths = sorted(folder.glob("*/*"))
    names = sorted({path.parent.name for path in paths})
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=names)})
    values = {"image": [str(path) for path in paths], "label": [names.index(path.parent.name) for path in paths]}
    return datasets.Dataset.from_dict(values, features=features)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """60 images of ten classes, which brightness tells apart."""
    root = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for i in range(60):
        noise = random.normal(25 * (i % 10), 20, (40, 50, 3)).clip(0, 255).astype(np.uint8)
        (root / str(i % 10)).mkdir(exist_ok=True)
        suffix = "jpg" if i % 2 else "png"
        Image.fromarray(noise).save(root / str(i % 10) / f"{i}.{suffix}")
    return root


def images(folder: Path, augmentation: str = "random_resized_crop", **kwargs) -> ClassificationDataset:
    rows = table_of(folder)
    preparation = Preparation(PROCESSOR, exact=False, whole=augmentation == "random_resized_crop")
    return ClassificationDataset(rows, "image", "label", preparation, Augmentation(augmentation), **kwargs)


def batches(data: ClassificationDataset, size: int = 16, **kwargs) -> list[dict[str, torch.Tensor]]:
    return [batch.to(CPU) for batch in batch_loader(data, size, CPU, **kwargs)]


def equal(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in ("pixel_values", "labels")
    )


def test_batches_depend_on_neither_workers_nor_cache(folder):
    expected = batches(images(folder, cache_gb=0))
    data = images(folder)
    assert equal(batches(data, num_workers=2), expected)
    assert data.start_copying(list(range(60)), 0, CPU) is not None
    # Workers are let go once there is nothing left for them.
    assert data._workers.processes
    data.set_epoch(1)
    assert not data._workers.processes
    data.set_epoch(0)
    assert equal(batches(data, num_workers=2), expected)
    assert not data._workers.processes
    other = images(folder)
    assert equal(batches(other, num_workers=2), expected)
    assert not other._workers.processes
    data.set_epoch(1)
    assert not equal(batches(data), expected)


@pytest.mark.parametrize("prepares", [False, True], ids=["evaluation", "training"])
def test_batches_that_were_used_take_no_memory(folder, prepares):
    loader, alive, most = batch_loader(images(folder, cache_gb=0), 3, CPU), [], 0
    for pending in loader:
        if prepares:
            loader.collate_fn.prepare()
        alive.append(weakref.ref(pending.to(CPU)["pixel_values"]))
        del pending
        most = max(most, sum(each() is not None for each in alive))
    assert len(alive) == 20
    # At the end, those that were requested ahead.
    assert most <= 4


def test_an_evaluations_workers_are_let_go(folder):
    data = images(folder, "none", evaluation=True)
    batches(data, num_workers=2)
    assert not data._workers.processes


def test_threads_go_on_where_a_worker_was_killed(folder, caplog):
    expected = batches(images(folder, cache_gb=0))
    data = images(folder)
    data.start_workers(2)
    for process in data._workers.processes:
        process.kill()
    assert equal(batches(data), expected)
    assert "is memory short?" in caplog.text


@pytest.mark.runs
def test_workers_end_with_a_parent_that_was_killed():
    code = (
        "import os, time\nfrom entame_hf.data.workers import Workers\n"
        "workers = Workers(int, 1)\nworkers.start(2)\n"
        "print(*(each.pid for each in workers.processes), flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(number) for number in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))


def is_running(process: int) -> bool:
    try:
        # One that nobody waits for stays in the list of processes.
        return " Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def test_exact_pixels_are_not_taken_from_others(folder):
    exact = ClassificationDataset(table_of(folder), "image", "label", Preparation(PROCESSOR))
    batches(images(folder, "none"))
    assert exact.start_copying(list(range(60)), 0, CPU) is None


def test_items_are_what_batches_hold(folder):
    data = images(folder)
    whole = batches(data, 60)[0]
    for i in (0, 33):
        torch.testing.assert_close(data[i]["pixel_values"], whole["pixel_values"][i], atol=1e-4, rtol=0)
        assert data[i]["labels"] == whole["labels"][i]


@pytest.mark.parametrize("way", ["overwritten", "replaced", "of_another_size"])
def test_a_file_that_changed_is_decoded_again(folder, tmp_path, way):
    target = tmp_path / "copy"
    size = 20_000 + max(path.stat().st_size for path in folder.rglob("*.*"))
    old, new = ((folder / name).read_bytes().ljust(size, b"\0") for name in ("1/1.jpg", "3/33.jpg"))
    for name in ("0", "1"):
        (target / name).mkdir(parents=True)
        (target / name / "a.jpg").write_bytes(old)
    path = target / "0" / "a.jpg"
    before, status = images(target, "none")[0]["pixel_values"], path.stat()
    if way == "replaced":
        (tmp_path / "new.jpg").write_bytes(new)
        (tmp_path / "new.jpg").replace(path)
    else:
        path.write_bytes(new if way == "overwritten" else new[:-10])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not torch.equal(before, images(target, "none")[0]["pixel_values"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_cache_is_decoded_again(folder, workers):
    expected = batches(images(folder, cache_gb=0))
    batches(images(folder))
    [path] = (datasets.config.HF_DATASETS_CACHE / "entame_hf").glob("*.images")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damage" * 5000)
    data = images(folder)
    assert data.start_copying(list(range(60)), 0, CPU) is not None
    assert equal(batches(data, num_workers=workers), expected)
    assert equal(batches(data, num_workers=workers), expected)


def test_unreadable_files_are_found_by_workers(folder, tmp_path):
    target = tmp_path / "copies"
    for name in ("a", "b"):
        (target / name).mkdir(parents=True)
        for i in range(100):
            (target / name / f"{i:03}.png").write_bytes((folder / "0" / "0.png").read_bytes())
    (target / "a" / "007.png").write_bytes(b"<html>")
    data = images(target, "none", evaluation=True)
    labels = torch.cat([batch["labels"] for batch in batches(data, 50, num_workers=2)])
    assert labels.tolist() == [0] * 7 + [-100] + [0] * 92 + [1] * 100
    assert data.summary().endswith("were skipped: " + str(target / "a" / "007.png"))
    for i in range(8, 13):
        (target / "a" / f"{i:03}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"6 of 200 images could not be read .* At most 1%"):
        batches(images(target, "none"), 50, num_workers=2)


def test_a_cache_that_does_not_show_what_it_keeps_is_left(folder, monkeypatch):
    expected = batches(images(folder, cache_gb=0))
    monkeypatch.setattr(ImageCache, "write", lambda *_: True)
    assert equal(batches(images(folder), num_workers=1), expected)
    assert equal(batches(images(folder)), expected)


class Recording(EntameTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        if model.training:
            self.seen.append({name: values.clone() for name, values in inputs.items()})
        return super().compute_loss(model, inputs, *args, **kwargs)


def trainer(model, data, output_dir, **kwargs) -> Recording:
    settings = {"max_steps": 8, "per_device_train_batch_size": 16, "save_steps": 6, "report_to": "none"}
    args = EntameTrainingArguments(str(output_dir), disable_tqdm=True, **{**settings, **kwargs})
    return Recording(model, args, train_dataset=data, eval_dataset=data)


def test_a_resumed_training_sees_the_batches_that_follow(folder, tiny_vit, tmp_path):
    whole = trainer(tiny_vit, images(folder), tmp_path)
    whole.train()
    # 60 images in batches of 16: step 6 is in the middle of the second epoch.
    resumed = trainer(tiny_vit, images(folder), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert equal(resumed.seen, whole.seen[6:])
    assert not equal(whole.seen[:4], whole.seen[4:8])


def test_accumulation_and_evaluation_see_every_image(folder, tiny_vit, tmp_path):
    data = images(folder, "none")
    each = trainer(tiny_vit, data, tmp_path, max_steps=-1, num_train_epochs=1, gradient_accumulation_steps=3)
    each.train()
    assert sorted(torch.cat([batch["labels"] for batch in each.seen]).tolist()) == sorted(data.labels.tolist())
    assert each.predict(data).label_ids.tolist() == data.labels.tolist()


@pytest.mark.parametrize("name", ["flip", "random_resized_crop"])
def test_images_to_train_on_are_evaluated_without_augmentation(folder, tiny_vit, tmp_path, name):
    rows, crops = table_of(folder), name == "random_resized_crop"
    preparation = Preparation(PROCESSOR, exact=False, whole=crops)
    data = ClassificationDataset(rows, "image", "label", preparation, Augmentation(name, mixup_alpha=0.4))
    held = ClassificationDataset(rows, "image", "label", Preparation(PROCESSOR, exact=False), evaluation=True)
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = EntameTrainer(tiny_vit, args, train_dataset=data, eval_dataset={"all": data, "held": held})
    expected, chosen = trainer.predict(held), [5, 0, 44]
    for found, wanted in (
        (trainer.predict(data), expected.predictions),
        # What `random_split` sets aside of the images to train on.
        (trainer.predict(Subset(data, chosen)), expected.predictions[chosen]),
    ):
        # Crops are taken of an image that was resized before.
        np.testing.assert_allclose(found.predictions, wanted, atol=0.1 if crops else 1e-6)
        assert found.label_ids.dtype == np.int64
    metrics = trainer.evaluate()
    assert metrics["eval_all_loss"] == pytest.approx(metrics["eval_held_loss"], abs=0.1 if crops else 1e-6)
    assert data[0]["labels"].shape == (10,)


def test_other_datasets_go_trainers_way(tiny_vit, tmp_path):
    own = trainer(tiny_vit, RandomImages(32), tmp_path, max_steps=1)
    own.train()
    assert own.seen[0]["pixel_values"].shape == (16, 3, 32, 32)


def test_images_of_a_folder_are_those_of_a_table(folder):
    rows = table_of(folder)
    table = rows.map(lambda row: {"image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}})
    preparation = Preparation(PROCESSOR)
    for data in (table, rows):
        first = ClassificationDataset(data, "image", "label", preparation)[7]["pixel_values"]
        with Image.open(BytesIO(table[7]["image"]["bytes"])) as image:
            expected = PROCESSOR(image, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(first, expected, atol=1e-5, rtol=0)
