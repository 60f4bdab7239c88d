"""Time how fast a training is fed: by resident images, by ours and by Trainer's usual transforms."""

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

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.data import (
    Augmentation,
    ClassificationDataset,
    Preparation,
    StreamingDataset,
    decode_image,
    evaluation_transform,
    load_splits,
    set_image_size,
)
from entame_hf.data.batches import to_device
from entame_hf.data.workers import cores, default_workers
from entame_hf.patch import as_transformers, timm_processor

from .memory import MemoryGauge
from .sample_images import draw_images
from .timers import EpochTimer, StepClock

WARM_UP = 8


class OnDevice(Dataset):
    """Ready images on the device, which no input can beat."""

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
    """Decode, flip and transform one image at a time, as tutorials do."""

    def __init__(self, rows: Any, transform: Any) -> None:
        self.rows = rows
        self.transform = v2.Compose([v2.RandomHorizontalFlip(), transform])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"pixel_values": self.transform(decode_image(row["image"])), "labels": row["label"]}


class Turns:
    """A loader that gives each epoch to the next of several loaders."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders, self.epoch = loaders, 0

    def __iter__(self) -> Iterator[Any]:
        round_, place = divmod(self.epoch, len(self.loaders))
        self.epoch += 1
        # In the epochs that it would have alone. Streams read the next one ahead.
        self.loaders[place].set_epoch(round_)
        return iter(self.loaders[place])

    def set_epoch(self, epoch: int) -> None:
        """Leave the epoch to each loader's own count."""

    def __len__(self) -> int:
        return len(self.loaders[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loaders[0], name)


class TurnsTrainer(EntameTrainer):
    """Train on each of `inputs` for an epoch in turn, beginning with `train_dataset`."""

    inputs: dict[str, Any]

    def get_train_dataloader(self) -> Any:
        first, loaders = self.train_dataset, []
        for data in self.inputs.values():
            if isinstance(data, OnDevice):
                resident = DataLoader(
                    data, self._train_batch_size, shuffle=True, collate_fn=data.collate, drop_last=True
                )
                loaders.append(self.accelerator.prepare(resident))
            else:
                self.train_dataset = data
                loaders.append(super().get_train_dataloader())
        self.train_dataset = first
        return Turns(*loaders)


def train_usually(options: argparse.Namespace, name: str, data: Dataset, workers: int) -> float:
    """Train with `Trainer` for some steps, and return images a second."""
    torch.manual_seed(0)
    # Each worker has two batches ready before the first step, which must not count.
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
    # The fastest layout for convolutions.
    model = timm.create_model(name, num_classes=10, **sized).to(memory_format=torch.channels_last)
    return as_transformers(model)


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Train each model on resident images, on files as we read them, and on files through the usual transforms.

    Epochs take turns in one training, as machines change their pace: images on the device, cached files, files without
    a cache, files of which a tenth is cached, and a stream of Parquet files. Each round gives their ratios over images
    on the device. An epoch includes the wait for its first batch. The first epoch, which fills the cache, is measured
    from its ninth step on. Host memory at the end is that beyond a training on resident images alone.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        draw_images(Path(folder) / "images", options.images, options.size)
        print(f"drew {options.images} images in {time.perf_counter() - start:.0f} s", flush=True)
        datasets.config.HF_DATASETS_CACHE = Path(folder)
        rows = load_splits(data_dir=str(Path(folder) / "images"), test_fraction=0.001).train
        if "stream" in options.inputs:
            write_shards(rows, Path(folder) / "shards")
        for name in options.models:
            results[name] = measure(options, name, rows, Path(folder))
    return {
        "size": options.size,
        "batch": options.batch,
        "compiled": options.compile,
        "images": options.images,
        "cores": cores(),
        "processes": default_workers(),
        **results,
    }


def write_shards(rows: Any, folder: Path, count: int = 8) -> None:
    """Write the files of rows into Parquet files, as the Hub stores them; a few once more, for validation."""
    folder.mkdir()
    shards = {f"train-{index}": rows.shard(count, index) for index in range(count)}
    for name, shard in (shards | {"validation": rows.select(range(8))}).items():
        files = [Path(image["path"]) for image in shard.cast_column("image", datasets.Image(decode=False))["image"]]
        table = {"image": [{"bytes": file.read_bytes()} for file in files], "label": shard["label"]}
        datasets.Dataset.from_dict(table, features=rows.features).to_parquet(folder / f"{name}.parquet")


def measure(options: argparse.Namespace, name: str, rows: Any, folder: Path) -> dict[str, Any]:
    processor = set_image_size(timm_processor(model_of(name, options.size)), options.size)
    figures: dict[str, Any] = {}
    for augmentation in options.augmentations:
        preparation = Preparation(processor, exact=False, whole=augmentation == "random_resized_crop")
        space = {"cached": 32.0, "uncached": 0.0}
        space["tenth"] = 0.1e-9 * len(rows) * 3 * preparation.size[0] * preparation.size[1]
        inputs: dict[str, Any] = {"device": OnDevice(len(rows) // options.batch * options.batch, options.size)}
        for key in [each for each in options.inputs if each in space]:
            # Caches in one folder share the space, and another model's would have the first epoch's images.
            datasets.config.HF_DATASETS_CACHE = folder / name / key
            inputs[key] = ClassificationDataset(
                rows, "image", "label", preparation, Augmentation(augmentation), cache_gb=space[key]
            )
        if "stream" in options.inputs:
            stream: Any = load_splits(dataset_name=str(folder / "shards"), streaming=True).train
            inputs["stream"] = StreamingDataset(stream, "image", "label", preparation, Augmentation(augmentation))
        measured = take_turns(options, name, inputs)
        figures |= {f"{key}_{augmentation}": value for key, value in measured.items()}
        print(name, figures, flush=True)
    usual = UsualTransforms(rows, evaluation_transform(processor))
    for workers in options.workers:
        figures[f"usual_{workers}_workers"] = train_usually(options, name, usual, workers)
        print(name, figures, flush=True)
    return figures


def take_turns(options: argparse.Namespace, name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Train on each input for an epoch, one after the other."""
    resident = MemoryGauge()
    train(options, name, {"device": inputs["device"]}, WARM_UP, resident)
    # The first epoch fills the cache, and is followed by one of each to warm up.
    inputs = {"cached": inputs.pop("cached"), **inputs}
    epoch = len(inputs["cached"]) // options.batch
    clock, timer, memory = StepClock(WARM_UP, epoch), EpochTimer(), MemoryGauge()
    train(options, name, inputs, epoch * len(inputs) * (1 + options.pairs), clock, timer, memory)
    # The first mark is the end of the first epoch.
    places = {key: len(inputs) - 1 + place for place, key in enumerate(inputs)}
    spans = {key: timer.ends.milliseconds()[place :: len(inputs)] for key, place in places.items()}
    images = 1e3 * epoch * options.batch
    first = clock.rate(options.batch, WARM_UP, epoch)
    figures: dict[str, Any] = {key: images / median(values) for key, values in spans.items()}
    figures |= {"first_epoch": first, "first_epoch_over_device": first * median(spans["device"]) / images}
    figures["host_gb_beyond_resident"] = memory.gigabytes - resident.gigabytes
    device = spans.pop("device")
    return figures | {
        f"{key}_over_device": [a / b for a, b in zip(device, values, strict=True)] for key, values in spans.items()
    }


def train(
    options: argparse.Namespace, name: str, inputs: dict[str, Any], steps: int, *callbacks: TrainerCallback
) -> None:
    """Train a new model on inputs that take turns."""
    torch.manual_seed(0)
    # The first steps would measure energies, and the first epoch be slower for it with any input.
    settings: dict[str, Any] = {"energy_logging_steps": 0, "dataloader_pin_memory": False}
    workers = default_workers()
    args = training_arguments(options, steps, EntameTrainingArguments, dataloader_num_workers=workers, **settings)
    first = next(iter(inputs.values()))
    trainer = TurnsTrainer(model_of(name, options.size), args, train_dataset=first, callbacks=[*callbacks])
    trainer.inputs = inputs
    trainer.train()
    torch._dynamo.reset()
