"""How fast a training is fed: from the device, by Trainer's usual transforms, and by ours."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import timm
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from transformers import Trainer, TrainerCallback, TrainingArguments

from entame_hf import EntameTrainer
from entame_hf.data import (
    Augmentation,
    ClassificationDataset,
    Preparation,
    build_datasets,
    decode_image,
    evaluation_transform,
    load_splits,
    set_image_size,
)
from entame_hf.data.batches import to_device
from entame_hf.data.workers import cores
from entame_hf.patch import as_transformers, timm_processor

from .drawing import draw_images
from .timers import EpochTimer, StepClock

WARM_UP = 8


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
        rows = to_device(torch.tensor(indices), self.images.device) % len(self.images)
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


class Turns:
    """A loader for a training whose epochs are given by several loaders in turn."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders, self.epoch = loaders, 0

    def __iter__(self) -> Iterator[Any]:
        loader = self.loaders[self.epoch % len(self.loaders)]
        self.epoch += 1
        return iter(loader)

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaders[0], name)


class TurnsTrainer(EntameTrainer):
    """Train on `train_dataset` in even epochs, and on ready images in odd ones, loaded as `Trainer` does."""

    ready: OnDevice

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(
            self.ready, self._train_batch_size, shuffle=True, collate_fn=self.ready.collate, drop_last=True
        )
        return Turns(super().get_train_dataloader(), self.accelerator.prepare(loader))


def train_usually(options: argparse.Namespace, name: str, data: Dataset, workers: int) -> float:
    """Train with `Trainer` for some steps, and give images a second."""
    torch.manual_seed(0)
    # Each worker has two batches ready before the first step, which would be counted as if they had taken no time.
    first = WARM_UP + 2 * workers
    last = first + max(options.usual_steps, 4 * workers)
    clock = StepClock(first, last)
    args = training_arguments(options, last, dataloader_num_workers=workers)
    Trainer(model_of(name, options.size), args, train_dataset=data, callbacks=[clock]).train()
    torch._dynamo.reset()
    return clock.rate(options.batch, first, last)


def training_arguments(
    options: argparse.Namespace, steps: int, kind: type[TrainingArguments] = TrainingArguments, **settings: Any
) -> TrainingArguments:
    return kind(
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

    (a) and (c) are epochs of one training that take turns, because machines change their pace, and each pair of them
    gives a ratio. An epoch includes the wait for its first batch. Ours decodes in its first epoch, which is given
    apart, and has the images in its cache afterwards; the next epoch of each warms up.
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
    figures: dict[str, Any] = {}
    for augmentation in options.augmentations:
        whole = augmentation == "random_resized_crop"
        preparation = Preparation(processor, exact=False, whole=whole)
        ours = ClassificationDataset(rows, "image", "label", preparation, Augmentation(augmentation))
        figures |= {f"{key}_{augmentation}": value for key, value in take_turns(options, name, ours).items()}
        print(name, figures, flush=True)
    usual = UsualTransforms(rows, evaluation_transform(processor))
    for workers in options.workers:
        figures[f"usual_{workers}_workers"] = train_usually(options, name, usual, workers)
        print(name, figures, flush=True)
    return figures


def take_turns(options: argparse.Namespace, name: str, ours: ClassificationDataset) -> dict[str, Any]:
    """Train on ours and on ready images, one epoch after the other."""
    torch.manual_seed(0)
    epoch = len(ours) // options.batch
    steps = epoch * (3 + 2 * options.pairs)
    clock, timer = StepClock(WARM_UP, epoch), EpochTimer()
    args = training_arguments(options, steps, dataloader_num_workers=cores(), dataloader_pin_memory=False)
    trainer = TurnsTrainer(model_of(name, options.size), args, train_dataset=ours, callbacks=[clock, timer])
    trainer.ready = OnDevice(epoch * options.batch, options.size)
    trainer.train()
    torch._dynamo.reset()
    # Without the end of the first epoch and the two that warm up.
    device, fed = (timer.ends.milliseconds()[start::2] for start in (2, 3))
    images = 1e3 * epoch * options.batch
    return {
        "first_epoch": clock.rate(options.batch, WARM_UP, epoch),
        "device": images / median(device),
        "ours": images / median(fed),
        "ours_over_device": [a / b for a, b in zip(device, fed, strict=True)],
    }


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
        data = build_datasets(splits, processor, seed=0).train
        built = time.perf_counter()
        clock = FirstStep()
        args = training_arguments(options, 1, dataloader_num_workers=cores())
        trainer = EntameTrainer(model, args, train_dataset=data, callbacks=[clock])
        called = time.perf_counter()
        trainer.train()
    return {
        "files": count,
        "batch": options.batch,
        "seconds_to_scan": scanned - start,
        "seconds_to_build_datasets": built - begin,
        "seconds_from_train_to_first_batch": clock.began - called,
    }


class FirstStep(TrainerCallback):
    """Note when the first step begins, which has its batch."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
