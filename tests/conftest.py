"""Small classifiers of every common kind, and data to train them on."""

from __future__ import annotations

import atexit
import copy
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

os.environ["HF_HUB_OFFLINE"] = "1"
# Images that tests decode are kept for this run alone.
os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp()

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from entame_hf import EntameTrainer
from entame_hf.patch import as_transformers

CONFIGURATIONS = Path(__file__).parent.parent / "scripts" / "launch"


def launch_by(configuration: str, *arguments: str, timeout: int = 300, **environment: str) -> CompletedProcess[str]:
    """Run a script by a configuration of accelerate; options of the launch, the script and its own options follow."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", str(CONFIGURATIONS / f"{configuration}.yaml"), *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

# Models this small train fastest on one thread, and idle threads that spin slow down whatever runs beside the tests.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

TINY_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def _timm(name: str, **kwargs: object) -> Callable[[int], nn.Module]:
    return lambda num_labels: timm.create_model(name, num_classes=num_labels, **kwargs)


def _tiny_vgg(num_labels: int) -> nn.Module:
    model = timm.models.vgg.VGG([16, "M", 16, "M"], num_classes=num_labels, mlp_ratio=0.02)
    model.pretrained_cfg = timm.get_pretrained_cfg("vgg11").to_dict()
    return model


def _hf(model: type[PreTrainedModel], config: type, **kwargs: object) -> Callable[[int], nn.Module]:
    return lambda num_labels: model(config(num_labels=num_labels, **kwargs))


# name: (factory by number of classes, side of the images, path of the head)
CLASSIFIERS: dict[str, tuple[Callable[[int], nn.Module], int, str]] = {
    "timm-resnet": (_timm("test_resnet"), 32, "fc"),
    "timm-densenet": (_timm("densenet121", growth_rate=8, block_config=(2, 2)), 64, "classifier"),
    "timm-vgg": (_tiny_vgg, 64, "head.fc"),
    "timm-inception_v3": (_timm("inception_v3"), 96, "fc"),
    "timm-efficientnet": (_timm("test_efficientnet"), 32, "classifier"),
    "timm-vit": (_timm("test_vit", img_size=32), 32, "head"),
    "timm-swin": (
        _timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            embed_dim=16,
            depths=(1, 1),
            num_heads=(1, 2),
            window_size=4,
        ),
        32,
        "head.fc",
    ),
    "timm-convnext": (_timm("test_convnext"), 32, "head.fc"),
    "timm-wrapped": (
        lambda n: as_transformers(timm.create_model("test_resnet", num_classes=n)),
        32,
        "timm_model.fc",
    ),
    "hf-resnet": (
        _hf(ResNetForImageClassification, ResNetConfig, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        32,
        "classifier.1",
    ),
    "hf-vit": (_hf(ViTForImageClassification, ViTConfig, **TINY_VIT), 32, "classifier"),
    "hf-swin": (
        _hf(
            SwinForImageClassification,
            SwinConfig,
            image_size=32,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[1, 2],
            window_size=4,
        ),
        32,
        "classifier",
    ),
    "hf-convnext": (
        _hf(ConvNextForImageClassification, ConvNextConfig, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
        32,
        "classifier",
    ),
    "hf-beit": (_hf(BeitForImageClassification, BeitConfig, **TINY_VIT), 32, "classifier"),
}


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    outputs = model(images)
    return outputs.logits if hasattr(outputs, "logits") else outputs


@pytest.fixture(params=CLASSIFIERS, ids=str)
def classifier(request: pytest.FixtureRequest) -> tuple[Callable[[int], nn.Module], int, str]:
    torch.manual_seed(0)
    return CLASSIFIERS[request.param]


@pytest.fixture(autouse=True)
def loggers_as_new() -> Iterator[None]:
    """Give the loggers back as they were: a run sets levels and warns once for its whole process."""
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # transformers adds it to all loggers
    loggers = [logging.getLogger(name) for name in ("entame_hf", "transformers")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (level, propagate) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture
def tiny_vit() -> ViTForImageClassification:
    """A transformers classifier without batch normalisation: what one example gives depends on no other."""
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **TINY_VIT)
    )


class RandomImages(Dataset):
    """Images whose class shows in their brightness, so that there is something to learn."""

    def __init__(self, count: int, side: int = 32, classes: int = 10, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % classes
        self.images = torch.randn(count, 3, side, side, generator=generator) + self.labels.view(-1, 1, 1, 1) / classes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


class OutOfMemoryTrainer(EntameTrainer):
    """Runs out of memory in its third step, once."""

    calls = 0

    def training_step(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().training_step(*args, **kwargs)


@pytest.fixture
def calls_to_host(monkeypatch) -> Counter:
    """Counts what makes the host wait for a tensor's values, by the method that was called."""
    calls: Counter = Counter()
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, name=name, original=original, **kwargs):
            calls[name] += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    return calls


def search_learning_rate(kind: type[EntameTrainer], args: object, model: nn.Module) -> None:
    """Let a trainer try three learning rates on copies of a model."""
    trainer = kind(
        args=args,
        model_init=lambda: copy.deepcopy(model),
        train_dataset=RandomImages(32),
        eval_dataset=RandomImages(16),
    )
    trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True)},
        n_trials=3,
    )


class WaitCounter(TrainerCallback):
    """Count how often the host waits for a GPU from the second step on, in which what is done once has been done."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self._catcher = warnings.catch_warnings(record=True)
            self._caught = self._catcher.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, args, state, control, **kwargs):
        torch.cuda.set_sync_debug_mode("default")
        self._catcher.__exit__(None, None, None)
        self.count = sum("called a synchronizing" in str(warning.message) for warning in self._caught)
