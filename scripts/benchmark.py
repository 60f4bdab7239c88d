"""Measure what ENTAME costs, each ratio side by side in one run; one JSON line a measurement.

python scripts/benchmark.py overhead      a training step of EntameTrainer over one of Trainer (needs a GPU)
python scripts/benchmark.py energy        a training step with energies measured over one without
python scripts/benchmark.py apply         apply_entame on a ViT-L, beyond drawing its head
python scripts/benchmark.py import        importing entame_hf after transformers' Trainer
python scripts/benchmark.py save          saving a ViT-B with EntameTrainer over saving it with Trainer
python scripts/benchmark.py cpu_layout    training steps in channels_last over contiguous tensors, on the CPU
python scripts/benchmark.py throughput    images a second of our input and of usual transforms, over resident images
python scripts/benchmark.py pass          the informed start's pass over the images, over an epoch of training
python scripts/benchmark.py first_batch   from train() on 50,000 files to the first batch
python scripts/benchmark.py scaling       the same batch a process on 1, 2, 4... GPUs of one host

All but scaling use one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import transformers
from benchmarks.first_batch import first_batch
from benchmarks.pass_cost import informed_pass
from benchmarks.scaling import scaling
from benchmarks.step_cost import energy, overhead
from benchmarks.throughput import throughput
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

from entame_hf import EntameTrainer, apply_entame, find_heads


def apply(options: argparse.Namespace) -> dict[str, Any]:
    """Time `apply_entame` on a ViT-L with 1,000 classes, beyond drawing as many numbers as its head has."""
    total, drawing = [], []
    for _ in range(options.repeats):
        model = timm.create_model("vit_large_patch16_224")
        shape = find_heads(model)[0].module.weight.shape
        start = time.perf_counter()
        torch.empty(shape).normal_()
        drawn = time.perf_counter()
        apply_entame(model)
        drawing.append(drawn - start)
        total.append(time.perf_counter() - drawn)
    beyond = [a - b for a, b in zip(total, drawing, strict=True)]
    return {
        "milliseconds_beyond_drawing_median": 1e3 * median(beyond),
        "milliseconds_beyond_drawing_max": 1e3 * max(beyond),
        "repeats": options.repeats,
    }


def import_time(options: argparse.Namespace) -> dict[str, Any]:
    """Time `import entame_hf` in fresh processes that imported Trainer."""
    code = (
        "import time; from transformers import Trainer, TrainingArguments; start = time.perf_counter(); "
        "import entame_hf; print(time.perf_counter() - start)"
    )
    times = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(options.repeats)]
    return {"seconds_median": median(times), "seconds_max": max(times), "repeats": options.repeats}


def save(options: argparse.Namespace) -> dict[str, Any]:
    """Save a ViT-B with 1,000 classes with both trainers in turn, to memory, as disks have hiccups."""

    def peak_memory() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    trainers: dict[str, Any] = {}
    for kind in (Trainer, EntameTrainer):
        torch.manual_seed(0)
        model = ViTForImageClassification(ViTConfig.from_dict({"num_labels": 1000}))
        trainers[kind.__name__] = kind(model, TrainingArguments(tempfile.mkdtemp(dir="/dev/shm")))
    head = apply_entame(trainers["EntameTrainer"].model).classifier.weight
    pairs, peaks = [], []
    for repeat in range(options.repeats + 1):
        times, memory = {}, {}
        for name in sorted(trainers, reverse=bool(repeat % 2)):
            # Reset the peak.
            Path("/proc/self/clear_refs").write_text("5")
            before, start = peak_memory(), time.perf_counter()
            trainers[name].save_model()
            times[name], memory[name] = time.perf_counter() - start, peak_memory() - before
        if repeat:
            pairs.append(times)
            peaks.append((memory["EntameTrainer"] - memory["Trainer"]) / (head.numel() * head.element_size()))
    for trainer in trainers.values():
        shutil.rmtree(trainer.args.output_dir)
    ratios = [pair["EntameTrainer"] / pair["Trainer"] for pair in pairs]
    return {
        "seconds_trainer": median(pair["Trainer"] for pair in pairs),
        "seconds_entame_trainer": median(pair["EntameTrainer"] for pair in pairs),
        "ratio_median": median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "extra_heads_in_memory_median": median(peaks),
        "extra_heads_in_memory_max": max(peaks),
        "repeats": options.repeats,
    }


def cpu_layout(options: argparse.Namespace) -> dict[str, Any]:
    """Time a training step of several families in both memory formats, in turn."""
    results = {}
    for name, side, batch in (
        ("tf_efficientnet_lite0", 64, 64),
        ("resnet50", 128, 16),
        ("densenet121", 128, 8),
        ("vgg11", 112, 8),
        ("inception_v3", 160, 8),
        ("convnext_tiny", 128, 8),
        ("swin_tiny_patch4_window7_224", 224, 4),
        ("vit_small_patch16_224", 224, 8),
    ):
        images, labels = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
        formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
        models = {
            key: timm.create_model(name, num_classes=10).train().to(memory_format=layout)
            for key, layout in formats.items()
        }
        times: dict[str, list[float]] = {key: [] for key in formats}
        for repeat in range(options.repeats + 1):
            for key, model in models.items():
                start = time.perf_counter()
                cross_entropy(model(images), labels).backward()
                if repeat:
                    times[key].append(time.perf_counter() - start)
        results[name] = median(a / b for a, b in zip(times["contiguous"], times["channels_last"], strict=True))
    return {"speedup_of_channels_last": results, "threads": torch.get_num_threads(), "repeats": options.repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measurements = {
        "overhead": overhead,
        "energy": energy,
        "apply": apply,
        "import": import_time,
        "save": save,
        "cpu_layout": cpu_layout,
        "throughput": throughput,
        "pass": informed_pass,
        "first_batch": first_batch,
        "scaling": scaling,
    }
    parser.add_argument("what", choices=measurements)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50, help="steps to time")
    parser.add_argument("--batch", type=int, default=256, help="images a step")
    feeding = parser.add_argument_group("throughput and pass")
    feeding.add_argument("--models", nargs="+", default=["resnet50", "vit_small_patch16_224"])
    feeding.add_argument("--size", type=int, default=224, help="side of the model's images")
    feeding.add_argument("--compile", action="store_true", help="train with torch.compile")
    feeding.add_argument("--images", type=int, default=12800, help="images of an epoch")
    feeding.add_argument("--pairs", type=int, default=5, help="rounds of epochs that take turns")
    feeding.add_argument("--augmentations", nargs="+", default=["flip", "random_resized_crop"])
    feeding.add_argument(
        "--inputs",
        nargs="+",
        default=["cached", "uncached", "tenth", "stream"],
        choices=["cached", "uncached", "tenth", "stream"],
        help="what takes turns with images on the device: files of which all, none or a tenth are cached, or a stream",
    )
    feeding.add_argument(
        "--workers",
        nargs="*",
        type=int,
        default=[0, 4, os.cpu_count()],
        help="of the usual transforms",
    )
    feeding.add_argument("--usual_steps", type=int, default=8, help="steps to time the usual transforms over")
    parser.add_argument("--results", type=Path, help="file to append the JSON line to")
    options = parser.parse_args()
    if options.what != "scaling":
        # Plain Trainer would use several GPUs through DataParallel, where some models fail.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    line = {
        "what": options.what,
        **measurements[options.what](options),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "timm": timm.__version__},
        "command": "python " + shlex.join(sys.argv),
    }
    print(json.dumps(line))
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        with options.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
