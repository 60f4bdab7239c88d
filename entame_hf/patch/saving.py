"""Save the stock model, by `save_pretrained` of transformers and of peft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import InputError
from ..heads import has_adapters, is_peft, leaves, timm_model, wrapped_models
from ..layers import ZNormLeaf
from .fold import folded, stock_state_dict
from .freezing import unsaved_batch_norms
from .gathering import is_sharded, reshard
from .state import adaptation_note, check_learns, differs_from_checkpoint, stop_check, without_notes


def patch_save_pretrained(model: nn.Module) -> None:
    """Make `save_pretrained` of a model and of its wrappers, and so `push_to_hub`, write the folded model.

    Plain `from_pretrained` would drop the statistics of an unfolded one with a remark, and give other logits;
    huggingface_hub's `PyTorchModelHubMixin` without one.
    """
    _watch_adapters()
    for part in wrapped_models(model):
        if hasattr(type(part), "save_pretrained"):
            # Copies and pickles of a partial object refer to the copied model; those of a bound method to its class.
            vars(part)["save_pretrained"] = partial(_save_pretrained, part)
            _count_batches(part, part)


def _count_batches(model: nn.Module, inside: nn.Module, prefix: str = "") -> None:
    """Note how many batches running statistics have seen that adapters will not hold."""
    layers: dict[str, Any] = unsaved_batch_norms(inside)
    counts = {prefix + path: layer.num_batches_tracked for path, layer in layers.items()}
    if layers and "entame_batches" not in vars(model):
        vars(model)["entame_batches"] = {path: int(count) for path, count in counts.items() if count is not None}


def _save_pretrained(
    model: Any, save_directory: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
) -> Any:
    if has_adapters(model):
        _check_adapter(model)
    for path, leaf in leaves(model):
        check_learns(head_name(path), leaf)
    if has_adapters(model) or not isinstance(model, PreTrainedModel):
        # peft names what it writes by its layers' own state dicts, and others take no `state_dict`.
        with folded(model):
            return type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if state_dict is None:
        reshard(model)
        if is_sharded(model):
            raise InputError(
                "The model is sharded over processes, and one shard of it would be saved. Gather it on every process: "
                "model.save_pretrained(..., state_dict=accelerator.get_state_dict(wrapped_model))."
            )
    kwargs["state_dict"] = stock_state_dict(model, state_dict)
    with shareable_config(model, None):
        return type(model).save_pretrained(model, save_directory, *args, **kwargs)


def _check_adapter(model: nn.Module) -> None:
    """Refuse to save an adapter that lacks what its base model gives other logits without.

    These are a head, and running statistics that have moved since the adapter was added.
    """
    layers: dict[str, Any] = unsaved_batch_norms(model)
    for path, count in vars(model).get("entame_batches", {}).items():
        if path in layers and layers[path].num_batches_tracked != count:
            raise InputError(
                f"The running statistics of `{path}` have moved in training, and this adapter would not hold them. "
                "Call eval() on BatchNorm layers after model.train(). To keep what was trained, merge the adapter and "
                "save the model: fold_entame(model).merge_and_unload().save_pretrained(...)."
            )
    for path, leaf in leaves(model):
        if differs_from_checkpoint(leaf) and "modules_to_save" not in path.split("."):
            raise InputError(
                f"`{head_name(path)}` was changed by ENTAME, and this adapter would not hold it. Merge the adapter "
                "and save the model: fold_entame(model).merge_and_unload().save_pretrained(...). Or train and save "
                f'the head with the adapter: LoraConfig(..., modules_to_save=["{head_name(path)}"]).'
            )


def lora_on_normalised(path: str) -> str:
    """Write the message for LoRA around a head over normalised features."""
    return (
        f"`{head_name(path)}` is adapted by LoRA, which would read features that are not normalised. Name the head in "
        "modules_to_save instead of target_modules."
    )


def head_name(path: str) -> str:
    """Get the name of a head, as peft's `modules_to_save` takes it, from a path through peft's layers."""
    steps = path.split(".")
    if "modules_to_save" in steps:
        at = steps.index("modules_to_save")
        del steps[at : at + 2]
    return [step for step in steps if step != "base_layer"][-1]


@cache
def _watch_adapters() -> None:
    # get_peft_model has no hook of its own, and gives the model that it wraps no notice.
    register_module_module_registration_hook(_on_registration)


def _on_registration(module: nn.Module, name: str, submodule: Any) -> None:
    """Make what peft wraps a model in save folded adapters too, and refuse adapters that freeze a new head."""
    if name == "base_layer" and is_peft(module):
        stop_check(submodule)
    if name != "base_model" or not is_peft(module) or not hasattr(type(module), "save_pretrained"):
        return
    heads = [(path, leaf) for path, leaf in leaves(submodule) if differs_from_checkpoint(leaf)]
    for path, leaf in heads:
        steps = path.split(".")
        if isinstance(leaf, ZNormLeaf) and steps[-1] == "base_layer":
            raise InputError(lora_on_normalised(path))
        if "modules_to_save" not in steps and steps[-1] != "base_layer":
            raise InputError(
                f"`{head_name(path)}` would be frozen by this adapter, and not be saved with it, although ENTAME has "
                f'changed it. Let peft train and save it: LoraConfig(..., modules_to_save=["{head_name(path)}"]); or '
                "fold it first: fold_entame(model)."
            )
    if heads:
        vars(module)["save_pretrained"] = partial(_save_pretrained, module)
        _count_batches(module, submodule, f"{name}.")


def class_names(config: PreTrainedConfig) -> list[str]:
    """List the names of a config's classes by index, whatever the order and the type of its map's keys."""
    return [name for _, name in sorted((config.id2label or {}).items(), key=lambda item: int(item[0]))]


def pretrained_cfg(model: PreTrainedModel) -> dict[str, Any]:
    """Get timm's description of a wrapped model; a wrapper that was built from a config has none of its own."""
    return getattr(model.config, "pretrained_cfg", None) or timm_model(model).pretrained_cfg


@contextmanager
def shareable_config(
    model: nn.Module, adaptation: dict[str, Any] | None, head_weights: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Complete a model's config for saving: what was done to the model, and what timm and transformers both read.

    `head_weights` are those that are saved. Models may share one config object, so it is restored afterwards. Only a
    `PreTrainedModel` has one.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    changes: dict[str, Any] = {} if adaptation is None else {"entame": adaptation}
    names = class_names(model.config)
    if names != [f"LABEL_{index}" for index in range(len(names))]:
        # from_pretrained(..., id2label=...) leaves the classes that a checkpoint came with in the other map.
        changes["label2id"] = {name: index for index, name in enumerate(names)}
    if timm_model(model) is not None:
        # timm's loader fails on null, and transformers' on a num_classes in it: {} serves both.
        changes["model_args"] = model.config.model_args or {}
        # transformers keeps the names that a checkpoint came with, whatever its new labels are.
        changes["label_names"] = names
        # The local path that timm read the weights from is private.
        private = ("file", "source")
        described = {k: v for k, v in pretrained_cfg(model).items() if k not in private}
        if adaptation is not None:
            described["notes"] = [*without_notes(described.get("notes")), *map(adaptation_note, head_weights)]
        changes["pretrained_cfg"] = described
    values = vars(model.config)
    before = {name: values[name] for name in changes if name in values}
    values.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del values[name]
        values.update(before)
