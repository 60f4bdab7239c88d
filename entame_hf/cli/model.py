"""Load a pretrained classifier in float32, with a new head where its classes differ, and refuse a damaged one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub import constants, model_info, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    BaseImageProcessor,
    PreTrainedModel,
)
from transformers.utils import CONFIG_NAME, logging

from ..config import EntameConfig
from ..errors import InputError
from ..heads import find_heads
from ..patch import apply_entame, class_names, fold_entame, has_trained_head, label_maps

logger = logging.get_logger(__name__)

ONE_LABEL = "single_label_classification"

# As transformers calls classes that nobody has named.
_UNNAMED = re.compile(r"LABEL_\d+")

# Examples of what can be given, for messages.
_EXAMPLE = "Give the id of an image classifier on the Hub, such as timm/resnet50.a1_in1k, or a folder that "
_EXAMPLE += "save_pretrained has written"


def load_classifier(
    name: str,
    names: list[str],
    *,
    revision: str = "main",
    trust_remote_code: bool = False,
    keeps_head: bool = False,
) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Load a pretrained classifier for some classes, and its image processor.

    Weights are float32 whatever the checkpoint holds: small updates are lost in half precision. The head is drawn anew
    where the checkpoint's classes are others, also if they are as many. With `keeps_head`, training continues from the
    checkpoint's head, and a warning says where that cannot be.
    """
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _loading(name, f"`model_name_or_path={name}`"):
        processor = AutoImageProcessor.from_pretrained(name, **where)
        before = AutoConfig.from_pretrained(name, **where)
        known, kind = class_names(before), before.problem_type
        model, report = AutoModelForImageClassification.from_pretrained(
            name,
            num_labels=len(names),
            **label_maps(names),
            problem_type=ONE_LABEL if kind else None,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            # A pickle may run code when it is loaded.
            use_safetensors=True,
            output_loading_info=True,
            **where,
        )
        heads = [head.path for head in find_heads(model)]
    new = list(heads)
    if all(f"{head}.weight" in report["missing_keys"] for head in heads):
        # A backbone that was pretrained alone has no pooler in front of the head either (BEiT, Data2Vec).
        new += [path for path, _ in model.named_modules() if path.endswith("pooler.layernorm")]
    lost = _lost_weights(model, new, report)
    if lost:
        raise InputError(
            f"`model_name_or_path={name}`: the checkpoint lacks {len(lost)} tensors of the backbone, or has them in "
            f"another shape, such as {lost[0]}. Only a head may be missing. {_EXAMPLE}."
        )
    if kind not in (None, ONE_LABEL):
        logger.warning(f"{name} is a model of {kind}: it is trained with cross-entropy, one label per image.")
    if known != names and not {name.rpartition(".")[0] for name in _not_loaded(report)} & set(heads):
        _match_head(model, known, names, keeps_head)
    elif keeps_head and known != names and set(known) & set(names):
        _warn_of_new_head(known, names)
    return model, processor


def load_trained(
    name: str, *, revision: str = "main", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, BaseImageProcessor]:
    """Load a classifier as it was trained, and its image processor: every tensor must be in the checkpoint."""
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _loading(name, name):
        processor = AutoImageProcessor.from_pretrained(name, **where)
        model, report = AutoModelForImageClassification.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **where
        )
    lost = _lost_weights(model, [], report)
    if lost:
        raise InputError(
            f"{name} is not a trained classifier: it lacks {len(lost)} tensors, such as {lost[0]}. {_EXAMPLE}."
        )
    kind = "regression" if model.config.num_labels == 1 else model.config.problem_type
    if kind not in (None, ONE_LABEL):
        raise InputError(
            f"{name} is a model of {kind}, whose outputs are no probabilities of classes: predict with pipeline of "
            "transformers. Or give a classifier of one class an image."
        )
    return model, processor


@contextmanager
def _loading(name: str, called: str) -> Iterator[None]:
    """Say in one line that a model cannot be loaded, and keep reports about new heads from the console."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        _check_found(name)
        yield
    # Unknown ids, damaged files, null or odd configs, other tasks: it is the named model that cannot be used.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{called} runs code from its own repository. Read that code, and if you trust it "
                "pass `trust_remote_code`."
            ) from error
        reason = shorten(str(error).rstrip(".:"), 200, placeholder=" ...") or type(error).__name__
        if isinstance(error, (AttributeError, KeyError, TypeError)):
            reason = f"its configuration is damaged ({reason})"
        raise InputError(f"Cannot load {called}: {reason}. {_EXAMPLE}.") from error
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _check_found(name: str) -> None:
    """Ask the Hub once for a model that is no folder and was never downloaded: loading would retry for minutes."""
    if Path(name).exists() or constants.HF_HUB_OFFLINE or try_to_load_from_cache(name, CONFIG_NAME):
        return
    try:
        model_info(name)
    except HfHubHTTPError:
        raise
    except Exception as error:
        raise ConnectionError(f"there is no such folder, and the Hub cannot be reached ({error})") from error


def _not_loaded(report: dict[str, Any]) -> list[str]:
    return [*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])]


def _lost_weights(model: nn.Module, heads: list[str], report: dict[str, Any]) -> list[str]:
    """List what was not loaded of weights and running statistics, heads left out; counters do not matter."""
    floating = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    return sorted(name for name in _not_loaded(report) if name in floating and name.rpartition(".")[0] not in heads)


def _match_head(model: PreTrainedModel, known: list[str], names: list[str], keeps_head: bool) -> None:
    """Draw the head of a checkpoint anew that has as many classes as the data, but others."""
    if not keeps_head and not has_trained_head(model):
        # It is drawn anew when training starts.
        return
    if keeps_head and all(_UNNAMED.fullmatch(name) for name in known):
        logger.warning(
            f"The checkpoint does not name its classes: its head is kept, in the order {shorten_names(names)}."
        )
        return
    fold_entame(apply_entame(model, EntameConfig.for_method("keep"), num_labels=len(names)))
    if keeps_head:
        _warn_of_new_head(known, names)


def _warn_of_new_head(known: list[str], names: list[str]) -> None:
    logger.warning(
        f"The checkpoint's classes are {shorten_names(known)}, and the data's {shorten_names(names)}: the head starts "
        "anew."
    )


def shorten_names(names: list[str], most: int = 3) -> str:
    """List the first of some names."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def check_input_size(model: PreTrainedModel, size: tuple[int, int]) -> None:
    """Make sure that a model takes images of a size, before anything is trained on them."""
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, *size, device=model.device, dtype=model.dtype))
    # Models say so in their own ways: assertions, shape mismatches, kernels larger than what is left of the image.
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise InputError(
            f"The model takes no images of {size[0]}×{size[1]}: {reason}. Change `image_size`."
        ) from error
