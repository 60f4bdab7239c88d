"""Model ids and bare timm models in, transformers classifiers and their image processors out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
)

from .checkpoint import class_names
from .config import EntameConfig
from .errors import InputError
from .fold import fold_entame
from .heads import TIMM_PREFIX, base_model, is_peft, timm_model
from .patch import apply_entame, carry_marks, was_adapted


@dataclass
class ModelArguments:
    """Say which model a script fine-tunes and what its images look like."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "An id on the Hub (timm/... included) or a local folder."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that the model's repository holds."})
    num_labels: int | None = field(
        default=None, metadata={"help": "How many classes you expect; the run stops where the data has others."}
    )
    image_size: int | None = field(default=None, metadata={"help": "Side of the images; by default the model's."})
    normalization: str = field(
        default="model",
        metadata={
            "help": "Whose mean and std images are normalised with: the model's or the training part's (the paper).",
            "choices": ["model", "dataset"],
        },
    )


def load_classifier(
    name: str, names: list[str], *, revision: str = "main", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Load a pretrained classifier, with a new head where its classes differ in number, and its image processor.

    Args:
        name (`str`): an id on the Hub (`timm/...` included) or a local folder.
        names (`list[str]`): names of the classes, by index.
        revision (`str`, *optional*, defaults to `"main"`): branch, tag or commit on the Hub.
        trust_remote_code (`bool`, *optional*, defaults to `False`): whether code of the repository may run.

    Returns:
        The model, in eval mode, and its image processor.

    Raises:
        InputError: the model cannot be loaded, or is no image classifier.
    """
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        processor = AutoImageProcessor.from_pretrained(name, **where)
        before = AutoConfig.from_pretrained(name, **where)
        model = AutoModelForImageClassification.from_pretrained(
            name,
            num_labels=len(names),
            **label_maps(names),
            ignore_mismatched_sizes=True,
            # A pickle may run code when it is loaded.
            use_safetensors=True,
            **where,
        )
    # What the libraries raise for an unknown id, an unreadable file, another task or a need for remote code.
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"--model_name_or_path {name} runs code from its own repository. Read that code, and if you trust it "
                "pass --trust_remote_code."
            ) from error
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"Cannot load --model_name_or_path {name}: {reason}. Give the id of an image classifier on the Hub, such "
            "as timm/resnet50.a1_in1k, or a folder that save_pretrained has written."
        ) from error
    if class_names(before) != names and was_adapted(model):
        # As many classes as before, and others: the head that was loaded knows nothing of them.
        fold_entame(apply_entame(model, EntameConfig.for_method("keep"), num_labels=len(names)))
    return model, processor


def check_input_size(model: PreTrainedModel, size: tuple[int, int]) -> None:
    """Make sure that a model takes images of a size, before anything is trained on them.

    Args:
        model (`PreTrainedModel`): an image classifier; evaluated once on the CPU or wherever it is.
        size (`tuple[int, int]`): height and width in pixels.

    Raises:
        InputError: it does not.
    """
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, *size, device=model.device, dtype=model.dtype))
    # Models say so in their own ways: assertions, shape mismatches, kernels larger than what is left of the image.
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"The model takes no images of {size[0]}×{size[1]}: {reason}. Change --image_size."
        ) from error


def label_maps(names: list[str]) -> dict[str, dict[Any, Any]]:
    """Build `id2label` and `label2id` for a model's config."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}


def timm_processor(model: PreTrainedModel) -> BaseImageProcessor:
    """Build the image processor of a wrapped timm model that was never saved, from what timm knows of it."""
    from transformers import TimmWrapperImageProcessor

    return TimmWrapperImageProcessor(model.config.pretrained_cfg, architecture=model.config.architecture)


def as_transformers(model: nn.Module) -> Any:
    """Wrap a bare timm model so that Trainer can train it; every other model is returned as it is.

    The wrapper holds `model` itself: what is trained through it is trained in place.

    Args:
        model (`torch.nn.Module`): a model made by `timm.create_model`, or any other.

    Returns:
        `TimmWrapperForImageClassification` or `model`.

    Raises:
        ValueError: the timm model was built with arguments that its saved checkpoint could not tell.
    """
    inner = timm_model(model)
    if inner is None or isinstance(base_model(model), PreTrainedModel):
        return model
    if is_peft(model):
        raise InputError("Wrap a timm model before you add adapters: get_peft_model(as_transformers(model), config).")
    # Imported where it is needed: it imports timm, half of what importing this package would cost.
    from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

    architecture = inner.pretrained_cfg["architecture"]
    known = inner.pretrained_cfg.get("label_names") or []
    named = label_maps(list(known)) if len(known) == inner.num_classes else {}
    for model_args in _likely_arguments(inner):
        config = TimmWrapperConfig.from_dict(
            {"architecture": architecture, "pretrained_cfg": dict(inner.pretrained_cfg), "model_args": model_args},
            num_labels=inner.num_classes,
            **named,
        )
        # No second copy of the weights, and nothing drawn from the random generator.
        with torch.device("meta"):
            wrapper = TimmWrapperForImageClassification(config)
        if _shapes(wrapper.timm_model) == _shapes(inner):
            wrapper.timm_model = inner
            carry_marks(inner, wrapper, TIMM_PREFIX)
            return wrapper
    raise InputError(
        f"This {architecture} differs from timm.create_model({architecture!r}, num_classes={inner.num_classes}), so "
        "no checkpoint of it would load. Build it through transformers, which saves the arguments: "
        "AutoModelForImageClassification.from_pretrained(..., model_args={...})."
    )


def _likely_arguments(model: Any) -> list[dict[str, Any]]:
    """List what `timm.create_model` may have been given: it leaves no trace but in layers made for one image size."""
    sizes = (getattr(module, "img_size", None) for module in model.modules())
    size = next((size for size in sizes if size is not None), None)
    return [{}] if size is None else [{}, {"img_size": list(size) if isinstance(size, tuple) else size}]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items() if ".znorm." not in name}
