"""Model ids and bare timm models in, transformers classifiers and their image processors out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
)

from ..config import EntameConfig
from ..errors import InputError
from ..patch import apply_entame, class_names, fold_entame, has_trained_head, label_maps


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
    if class_names(before) != names and has_trained_head(model):
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
