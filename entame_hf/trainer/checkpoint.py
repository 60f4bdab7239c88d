"""Checkpoints of stock models, and the unfolded head, needed only to resume, in a file beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel
from transformers.models.timm_wrapper.image_processing_timm_wrapper import TimmWrapperImageProcessor
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME, SAFE_WEIGHTS_NAME, logging

from ..config import EntameConfig
from ..data import known_preparation, update_pretrained_cfg
from ..errors import InputError
from ..files import write_text, written_beside
from ..heads import TIMM_PREFIX, base_model, find_heads, is_peft, timm_model
from ..patch import (
    applied_config,
    describe_adaptation,
    folded,
    normalised_heads,
    set_applied,
    set_feature_norm,
    set_trained,
    shareable_config,
    stock_state_dict,
)

logger = logging.get_logger(__name__)

HEAD_STATE_NAME = "entame_head.safetensors"


def save_trained(trainer: Any, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write a trainer's model, folded, with its image processor and what is needed to resume its heads.

    Trainer's arguments are not written: they hold a token, and paths of this machine. `state_dict` is the model's,
    gathered from shards.
    """
    config, rate = applied_config(trainer.model), trainer.args.learning_rate
    record = describe_adaptation(trainer.model, trainer.head_args.entame_method, rate, trainer.head_rates.record())
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    stock, dtype = stock_state_dict(trainer.model, state_dict), trainer.head_args.save_dtype
    if dtype != "float32":
        buffers = {name.removeprefix(TIMM_PREFIX) for name, _ in base_model(model).named_buffers()}
        stock, dtype = _in_half_precision(stock, buffers, dtype)
    paths = [f"{head.path.removeprefix(TIMM_PREFIX)}.weight" for head in trainer.heads()]
    heads = [stock[path] for path in paths if path in stock]
    processor = trainer.processing_class
    # timm's writes nothing but a warning: it is kept in config.json.
    in_config = isinstance(processor, TimmWrapperImageProcessor)
    with written_beside(folder) as draft:
        with shareable_config(trainer.model, record, heads):
            if in_config and isinstance(trainer.model, PreTrainedModel) and timm_model(trainer.model) is not None:
                described = trainer.model.config
                described.pretrained_cfg = update_pretrained_cfg(described.pretrained_cfg, processor)
            _save_stock_model(model, draft, stock)
        if dtype != "float32" and (draft / CONFIG_NAME).is_file():
            # transformers writes the type of the model in memory, which plain from_pretrained loads.
            config_file = json.loads((draft / CONFIG_NAME).read_text(encoding="utf-8"))
            write_text(draft / CONFIG_NAME, json.dumps({**config_file, "dtype": dtype}, indent=2) + "\n")
        if processor is not None and not in_config:
            processor.save_pretrained(draft)
        if config:
            save_head_state(trainer.model, config, draft, state_dict)
    if in_config:
        # An earlier model's, which transformers would read first.
        (folder / IMAGE_PROCESSOR_NAME).unlink(missing_ok=True)


def saved_processor(processing_class: Any, *datasets: Any) -> Any:
    """Choose the processor that is saved with a model: by default, what prepares the images of its datasets.

    Args:
        processing_class: the one that the trainer was given, or None.
        datasets: a dataset, or a mapping of datasets, each; the first that prepares images counts.

    Raises:
        InputError: `processing_class` prepares images otherwise: the saved model would see others than were evaluated.
    """
    for dataset in [part for each in datasets for part in (each.values() if isinstance(each, dict) else (each,))]:
        preparation = known_preparation(dataset)
        if preparation is None:
            continue
        if isinstance(processing_class, BaseImageProcessor) and not preparation.is_as(processing_class):
            raise InputError(
                "`processing_class` prepares images otherwise than the datasets, so the saved model would see others "
                "than those that it is evaluated on. Leave it out, or give that of `build_datasets`: data.processor."
            )
        return preparation.processor if processing_class is None else processing_class
    return processing_class


def _in_half_precision(state: dict[str, Tensor], buffers: set[str], dtype: str) -> tuple[dict[str, Tensor], str]:
    """Convert weights, but not running statistics; none if one of them would overflow."""
    kind = getattr(torch, dtype)
    changed = {name for name, tensor in state.items() if tensor.is_floating_point()} - buffers
    found = {name: tensor.to(kind) if name in changed else tensor for name, tensor in state.items()}
    for name in changed:
        if not found[name].isfinite().all():
            logger.warning(
                f"`save_dtype={dtype}` cannot hold {name}, up to {float(state[name].abs().max()):.3g}: the model is "
                "saved in float32. Use `save_dtype=bfloat16`."
            )
            return state, "float32"
    return found, dtype


def save_head_state(
    model: nn.Module, config: EntameConfig, folder: str | Path, state_dict: dict[str, Tensor] | None = None
) -> None:
    """Write what folding loses: the unfolded heads, their feature statistics and, in the metadata, their config."""
    state = model.state_dict() if state_dict is None else state_dict
    heads = tuple(f"{path}." for path, _ in normalised_heads(model))
    tensors = {name: tensor.detach().contiguous() for name, tensor in state.items() if name.startswith(heads)}
    metadata = {"format": "pt", "entame": json.dumps(config.to_dict())}
    safetensors.torch.save_file(tensors, str(Path(folder, HEAD_STATE_NAME)), metadata=metadata)


def _save_stock_model(model: Any, folder: Path, state_dict: dict[str, Tensor]) -> None:
    """Write an unwrapped model as `Trainer` does, without its arguments."""
    if not (isinstance(model, PreTrainedModel) or is_peft(model)):
        tensors = _with_own_memory(state_dict)
        safetensors.torch.save_file(tensors, str(folder / SAFE_WEIGHTS_NAME), metadata={"format": "pt"})
        return
    model.save_pretrained(folder, state_dict=state_dict)
    # peft's is of blanks and the base model's path.
    (folder / "README.md").unlink(missing_ok=True)


def _with_own_memory(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give tensors as safetensors takes them: in the usual order in memory, and tied ones each with its own values."""
    seen: set[int] = set()
    found = {}
    for name, tensor in state_dict.items():
        tensor = tensor.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return found


def forget_local_base(folder: str | Path) -> None:
    """Replace the path of an adapter's local base model by its name."""
    file = Path(folder, "adapter_config.json")
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        if base and Path(base).exists():
            config["base_model_name_or_path"] = Path(base).name
            write_text(file, json.dumps(config, indent=2) + "\n")


def saved_config(folder: str | Path) -> EntameConfig | None:
    """Read the config that a checkpoint was trained with; None without ENTAME."""
    file = Path(folder, HEAD_STATE_NAME)
    if not file.exists():
        return None
    try:
        with safe_open(str(file), framework="pt") as tensors:
            return EntameConfig.from_dict(json.loads(tensors.metadata()["entame"]))
    except (SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(_damaged(file, error)) from error


def saved_record(folder: str | Path) -> dict[str, Any]:
    """Read from a checkpoint's config how its model was adapted; empty if it does not say."""
    file = Path(folder, CONFIG_NAME)
    try:
        return dict((json.loads(file.read_text(encoding="utf-8")).get("entame") if file.exists() else None) or {})
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(_damaged(file, error)) from error


def _damaged(path: str | Path, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"{path} cannot be resumed from ({reason}). Give another checkpoint, `resume_from_checkpoint=FOLDER`."


def prepare_resuming(model: nn.Module, config: EntameConfig, folder: str | Path) -> None:
    """Give a model the structure that a checkpoint's head state needs, before it is sharded; nothing is drawn.

    Raises:
        InputError: the checkpoint was trained with another config than the run asks for.
    """
    saved = saved_config(folder)
    if saved is None and saved_record(folder):
        raise InputError(_damaged(folder, FileNotFoundError(f"{HEAD_STATE_NAME} is missing")))
    if saved is None:
        logger.warning_once(f"{folder} was not trained with ENTAME: the run resumes without it.")
    elif saved != config:
        differences = "; ".join(
            f"`{name}`: {getattr(saved, name)} in the checkpoint, {value} in this run"
            for name, value in config.to_dict().items()
            if value != getattr(saved, name)
        )
        raise InputError(
            f"{folder} was trained with another EntameConfig. {differences}. Resume with the same, or start a new run "
            "from its model."
        )
    elif applied_config(model) != saved:
        set_feature_norm(find_heads(model, saved.head), saved)
        set_applied(model, saved)


def load_weights(model: nn.Module, folder: str | Path) -> bool:
    """Load a checkpoint into a model through `from_pretrained`, and tell whether that can build the model.

    transformers saves some models under the names their checkpoints have on the Hub (ViT among them). Trainer's own
    loading does not translate them back: it leaves such a backbone as it was, with a warning.

    Raises:
        RuntimeError: the checkpoint does not hold exactly the model's tensors.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    try:
        # Wide enough for every tensor of a model of mixed precision.
        wide = torch.promote_types(model.dtype, torch.float32)
        loaded: Any = type(model).from_pretrained(folder, dtype=wide, output_loading_info=True)
    except (TypeError, OSError):
        return False
    stock, report = loaded
    # transformers draws them at random.
    if missing := sorted(report["missing_keys"]):
        raise RuntimeError(f"it lacks {len(missing)} tensors of the model, such as {missing[0]}")
    model.load_state_dict(stock.state_dict())
    return True


def load_head_state(model: nn.Module, folder: str | Path) -> None:
    """Load what [`save_head_state`] wrote over the folded weights; do nothing without such a file."""
    file = Path(folder, HEAD_STATE_NAME)
    if not file.exists():
        return
    tensors = safetensors.torch.load_file(str(file))
    for path, leaf in normalised_heads(model):
        prefix = f"{path}."
        leaf.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    _note_trained(model, folder)


def _note_trained(model: nn.Module, folder: str | Path) -> None:
    """Note on a model's heads what a checkpoint says: loading weights over them clears what was noted."""
    config = saved_config(folder)
    if config is not None:
        set_applied(model, config)
        set_trained(model)


def load_trained(trainer: Any, folder: str | Path, load: Callable[[], None]) -> None:
    """Load a checkpoint's model and its unfolded heads into a trainer's model.

    `load` loads by Trainer's means, where there is no better way. A sharded model is saved and loaded as it trains.

    Raises:
        InputError: the checkpoint is damaged, or holds another model.
    """
    model = trainer.model
    try:
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            load()
            _note_trained(model, folder)
            return
        if is_peft(model):
            with folded(model):
                load()
        elif not load_weights(model, folder):
            load()
        load_head_state(model, folder)
    except torch.OutOfMemoryError:
        raise
    # Tensors that are missing or of another shape.
    except (SafetensorError, RuntimeError, KeyError) as error:
        raise InputError(_damaged(folder, error)) from error
