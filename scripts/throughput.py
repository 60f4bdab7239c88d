"""How fast a training is fed: from the device, by Trainer's usual transforms, and by ours."""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import timm
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2
from transformers import Trainer, TrainerCallback, TrainingArguments

from entame_hf import EntameTrainer
from entame_hf.data import (
    Augmentation,
    ClassificationDataset,
    DataArguments,
    Preparation,
    build_datasets,
    decode_image,
    evaluation_transform,
    load_splits,
    set_image_size,
)
from entame_hf.data.workers import cores
from entame_hf.models import as_transformers, timm_processor

WARM_UP = 8


class StepClock(TrainerCallback):
    """Note when each step ended, with the device's queue empty at the ends that are read."""

    def __init__(self, *read: int) -> None:
        self.read = read
        self.ends: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.read:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends[state.global_step] = time.perf_counter()

    def rate(self, batch: int, first: int, last: int) -> float:
        return batch * (last - first) / (self.ends[last] - self.ends[first])


class OnDevice(Dataset):
    """Ready images on the device: what no input can be faster than."""

    def __init__(self, count: int, size: int, distinct: int = 1024) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.count = count
        self.images = torch.randn(distinct, 3, size, size, device=device)
        self.labels = torch.randint(10, (distinct,), device=device)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, indices: list[int]) -> dict[str, Tensor]:
        rows = torch.tensor(indices, device=self.images.device) % len(self.images)
        return {"pixel_values": self.images[rows], "labels": self.labels[rows]}


class UsualTransforms(Dataset):
    """What tutorials do: decode, flip and the processor's transform, one image at a time."""

    def __init__(self, rows: Any, transform: Any) -> None:
        self.rows = rows
        self.transform = v2.Compose([v2.RandomHorizontalFlip(), transform])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"pixel_values": self.transform(decode_image(row["image"])), "labels": row["label"]}


def draw_image(path: Path, width: int, height: int) -> None:
    """Write an image that compresses as photographs do: smooth fields, texture, shapes and a little noise."""
    random = np.random.default_rng(int(path.stem))
    fields = [
        random.integers(0, 256, (6, 8, 3), dtype=np.uint8),
        random.integers(0, 256, (94, 125, 3), dtype=np.uint8),
    ]
    smooth, texture = (
        np.asarray(Image.fromarray(field).resize((width, height), Image.Resampling.BICUBIC), np.float32)
        for field in fields
    )
    noisy = smooth + (texture - 128) / 6 + random.normal(0, 4, (height, width, 1))
    image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
    canvas = ImageDraw.Draw(image)
    for _ in range(8):
        x, y, side = (int(random.integers(0, limit)) for limit in (width, height, width // 4 + 1))
        canvas.ellipse([x, y, x + side, y + side], fill=tuple(int(v) for v in random.integers(0, 256, 3)))
    # The usual large photograph of a data set, and the usual small picture.
    options: dict[str, Any] = {"format": "JPEG", "quality": 90} if path.suffix == ".jpg" else {"format": "PNG"}
    data = io.BytesIO()
    image.save(data, **options)
    path.write_bytes(data.getvalue())


def draw_images(folder: Path, count: int, size: int) -> None:
    width, height, suffix = (500, 375, ".jpg") if size > 64 else (size, size, ".png")
    paths = [folder / str(i % 10) / f"{i}{suffix}" for i in range(count)]
    for path in paths[:10]:
        path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(draw_image, width=width, height=height), paths, chunksize=64))


def train(
    kind: type[Trainer], options: argparse.Namespace, name: str, data: Any, steps: int, **settings: Any
) -> StepClock:
    torch.manual_seed(0)
    per_epoch = len(data) // options.batch
    clock = StepClock(*(step for step in (WARM_UP, per_epoch, steps) if step <= steps))
    collate = settings.pop("collate", None)
    args = training_arguments(options, steps, **settings)
    kind(model_of(name, options.size), args, train_dataset=data, data_collator=collate, callbacks=[clock]).train()
    torch._dynamo.reset()
    return clock


def training_arguments(options: argparse.Namespace, steps: int, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=options.batch,
        dataloader_drop_last=True,
        bf16=torch.cuda.is_available(),
        torch_compile=options.compile,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        **settings,
    )


def model_of(name: str, size: int) -> Any:
    sized: dict[str, Any] = {"img_size": size} if "vit" in name and size != 224 else {}
    # The layout that convolutions are fastest in.
    model = timm.create_model(name, num_classes=10, **sized).to(memory_format=torch.channels_last)
    return as_transformers(model)


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Train each model on images from the device (a), through Trainer's usual transforms (b) and through ours (c).

    All in one process. Ours decodes in its first epoch, which is given apart, and has the images in its cache
    afterwards: then runs of (a) and (c) take turns, because machines change their pace, and each pair gives a ratio.
    Each run's first epoch warms up; between epochs, the first batch is waited for, which is counted.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        draw_images(Path(folder) / "images", options.images, options.size)
        print(f"drew {options.images} images in {time.perf_counter() - start:.0f} s", flush=True)
        datasets.config.HF_DATASETS_CACHE = Path(folder)
        rows = load_splits(data_dir=str(Path(folder) / "images"), test_fraction=0.001).train
        for name in options.models:
            results[name] = measure(options, name, rows)
    return {
        "size": options.size,
        "batch": options.batch,
        "compiled": options.compile,
        "images": options.images,
        **results,
    }


def measure(options: argparse.Namespace, name: str, rows: Any) -> dict[str, Any]:
    processor = set_image_size(timm_processor(model_of(name, options.size)), options.size)
    epoch = len(rows) // options.batch
    last = epoch * options.epochs
    on_device = OnDevice(epoch * options.batch, options.size)
    figures: dict[str, Any] = {}
    for augmentation in options.augmentations:
        whole = augmentation == "random_resized_crop"
        preparation = Preparation(processor, exact=False, whole=whole)
        ours = ClassificationDataset(rows, "image", "label", preparation, Augmentation(augmentation))
        feed = {"dataloader_num_workers": cores()}
        clock = train(EntameTrainer, options, name, ours, epoch, **feed)
        figures[f"ours_{augmentation}_first_epoch"] = clock.rate(options.batch, WARM_UP, epoch)
        pairs = []
        for _ in range(options.pairs):
            ready = train(
                EntameTrainer, options, name, on_device, last, collate=on_device.collate, dataloader_pin_memory=False
            )
            pairs.append(
                [
                    clock.rate(options.batch, epoch, last)
                    for clock in (ready, train(EntameTrainer, options, name, ours, last, **feed))
                ]
            )
        figures["device"] = median(ready for ready, _ in pairs)
        figures[f"ours_{augmentation}"] = median(fed for _, fed in pairs)
        figures[f"ours_{augmentation}_over_device"] = [fed / ready for ready, fed in pairs]
        print(name, figures, flush=True)
    usual = UsualTransforms(rows, evaluation_transform(processor))
    for workers in options.workers:
        steps = WARM_UP + options.usual_steps
        clock = train(Trainer, options, name, usual, steps, dataloader_num_workers=workers)
        figures[f"usual_{workers}_workers"] = clock.rate(options.batch, WARM_UP, steps)
        print(name, figures, flush=True)
    return figures


def first_batch(options: argparse.Namespace) -> dict[str, Any]:
    """Time how long a training on 50,000 files takes to its first batch, its parts before that included."""
    count, classes, distinct = 50_000, 100, 100
    with tempfile.TemporaryDirectory() as folder:
        datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"
        draw_images(Path(folder) / "drawn", distinct, 224)
        drawn = sorted((Path(folder) / "drawn").glob("*/*.jpg"))
        for i in range(count):
            target = Path(folder) / "images" / str(i % classes) / f"{i}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(drawn[i // classes % distinct])
        start = time.perf_counter()
        splits = load_splits(data_dir=str(Path(folder) / "images"))
        scanned = time.perf_counter()
        model = as_transformers(timm.create_model("resnet18", num_classes=classes))
        processor = set_image_size(timm_processor(model), 224)
        begin = time.perf_counter()
        data, _, _ = build_datasets(splits, processor, DataArguments(), seed=0)
        built = time.perf_counter()
        clock = FirstBatch()
        args = training_arguments(options, 1, dataloader_num_workers=cores())
        EntameTrainer(model, args, train_dataset=data, callbacks=[clock]).train()
    return {
        "files": count,
        "batch": options.batch,
        "seconds_to_scan": scanned - start,
        "seconds_to_build_datasets": built - begin,
        "seconds_from_train_to_first_batch": clock.seconds,
    }


class FirstBatch(TrainerCallback):
    """Time from the start of the training to the start of its first step, which has its batch."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.start
