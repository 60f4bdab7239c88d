"""Start a run: resolve the config, initialise the heads, freeze, and warn before any time is spent."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..config import EntameConfig, noise_to_signal_ratio
from ..errors import InputError
from ..heads import Head, base_model, find_heads, has_adapters, is_peft, num_classes
from ..layers import without_statistics
from ..patch import (
    BATCH_NORMS,
    applied_config,
    apply_entame,
    check_bias,
    clear_entame_state,
    frozen_backbone,
    frozen_statistics,
    unsaved_batch_norms,
)
from ..training_args import AUTO, EntameTrainingArguments, HeadArguments
from .checkpoint import prepare_resuming
from .labels import named_datasets
from .loss import choose_loss
from .parallel import check_sharding, normalise_in_float32
from .provenance import check_provenance
from .resume import has_finite_weights

logger = logging.get_logger(__name__)


def resolve_config(entame: EntameConfig | None, args: HeadArguments, model: nn.Module) -> EntameConfig:
    """Resolve what is done to a model's heads.

    The first of these that is set counts: the trainer's argument `entame`; `entame_method` of the training arguments;
    the config that [`apply_entame`] got; the recipe's method; `"entame"`. The other options that are set in the
    training arguments (`phi_w`, `noise_lambda`, `znorm_momentum`, `znorm_sync`) override fields of all but `entame`.
    """
    config = args.entame_config(applied_config(model)) if entame is None else entame
    if config.init != "ridge" or not config.feature_norm:
        return config
    # The mean of normalised features folds into a bias. A ridge head over raw features needs none.
    lacking = [head.path for head in find_heads(model, config.head) if head.module.bias is None]
    if lacking:
        logger.warning_once(f"{', '.join(lacking)} has no bias: the informed head reads raw features.")
    return replace(config, feature_norm=not lacking)


def explain_precedence(entame: EntameConfig | None, args: HeadArguments, model: nn.Module) -> None:
    """Log which config counts, and which it overrides, if two of those that [`resolve_config`] compares differ."""
    config, applied = resolve_config(entame, args, model), applied_config(model)
    name = "the training arguments" if entame is None else "the argument `entame`"
    others = {"the config that apply_entame got": applied}
    if entame is not None and args.sets_config():
        others["the training arguments"] = args.entame_config(applied)
    for other, overridden in others.items():
        if overridden is not None and overridden != config:
            fields = [field for field, value in config.to_dict().items() if getattr(overridden, field) != value]
            ours, theirs = (", ".join(f"{f}={getattr(c, f)!r}" for f in fields) for c in (config, overridden))
            logger.warning(f"{name[0].upper()}{name[1:]} ({ours}) override {other} ({theirs}).")


def prepare_model(trainer: Any, checkpoint: str | None) -> None:
    """Start the heads of a trainer's model, or give them a checkpoint's structure, and freeze what is to be frozen."""
    model, args, own = trainer.model, trainer.args, trainer.head_args
    if isinstance(args, EntameTrainingArguments):
        # A search sets some.
        args.check()
    choose_loss(trainer)
    if checkpoint is None:
        trainer.provenance = check_provenance(trainer, None)
    config = trainer.entame_config()
    check_loaded(model)
    explain_changed_layers(model)
    check_sharding(trainer.accelerator, config, own.warmup_steps_of_head(), own.resolve("head_lr") == AUTO)
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if sharded and trainer.accelerator.mixed_precision != "no":
        normalise_in_float32(model)
    # auto_find_batch_size tries a smaller batch.
    trainer.frozen.close()
    if checkpoint is not None:
        trainer.head_rates.check_resuming(checkpoint)
        prepare_resuming(model, config, checkpoint)
    else:
        if trainer.attempts:
            clear_entame_state(model)
        explain_precedence(trainer.entame, own, model)
        trainer.head_fitter.explain_refreshing()
        start_heads(
            model,
            config,
            learning_rate=args.learning_rate,
            seed=args.seed,
            batch_size=trainer.head_fitter.batch_size(),
            accumulation=args.gradient_accumulation_steps,
        )
        if not has_finite_weights(model):
            raise InputError("The model has weights that are not finite before any training. Load another checkpoint.")
    trainer.attempts += 1
    if args.device.type == "cpu" and not sharded:
        model.to(memory_format=torch.channels_last)
    if checkpoint is None and config.init == "ridge":
        trainer.head_fitter.fit()
    if own.freeze_backbone:
        trainer.frozen.enter_context(frozen_backbone(model, trainer.heads()))
    elif freezes_statistics(model, own.resolve("freeze_statistics")):
        trainer.frozen.enter_context(frozen_statistics(model))
    trainer.trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trainer.trainable:
        raise InputError("All parameters of the model are frozen. Unfreeze some: model.requires_grad_(True).")


def freezes_statistics(model: nn.Module, asked: bool | None) -> bool:
    """Tell whether BatchNorm's running statistics are frozen: as asked for, or because an adapter holds none."""
    unsaved = next(iter(unsaved_batch_norms(model)), None)
    if unsaved and asked is False:
        raise InputError(
            f"`freeze_statistics=False` moves the running statistics of `{unsaved}`, and an adapter's checkpoint "
            "would not hold them. Leave it out, and they are frozen."
        )
    if unsaved or asked:
        return True
    layers: list[Any] = [module for module in model.modules() if isinstance(module, BATCH_NORMS)]
    if any(layer.weight is not None and not layer.weight.requires_grad for layer in layers):
        logger.warning(
            "BatchNorm layers are frozen, and their running statistics still move with each batch. Set "
            "`freeze_statistics=True`; or `freeze_backbone=True`, to train the heads alone."
        )
    return False


def check_loaded(model: nn.Module | None, moves: bool = True) -> None:
    """Make sure that accelerate's hooks offload no weights of a model that is trained, or that Trainer `moves`."""
    for name, module in model.named_modules() if model is not None and moves else ():
        if "_hf_hook" in vars(module) and any(parameter.is_meta for parameter in module.parameters()):
            raise InputError(
                f"{name or 'The model'} is offloaded, and such weights cannot be trained. Load the model without "
                "`device_map` and cpu_offload."
            )


def explain_changed_layers(model: nn.Module) -> None:
    """Warn of a transformers model whose layers were exchanged: `from_pretrained` builds it as its config says."""
    base = base_model(model)
    own = not isinstance(base, PreTrainedModel) or not type(base).__module__.startswith("transformers.")
    if own or has_adapters(model):
        return
    with torch.device("meta"):
        stock = type(base)(copy.deepcopy(base.config))
    known, saved = (without_statistics(part.state_dict()) for part in (stock, base))
    missing, unknown = (next((name for name in a if name not in b), None) for a, b in ((known, saved), (saved, known)))
    if missing or unknown:
        effects = [f"draw `{missing}` at random"] * bool(missing) + [f"drop `{unknown}`"] * bool(unknown)
        logger.warning_once(
            f"Layers of this {type(base).__name__} were exchanged: from_pretrained would {' and '.join(effects)} of a "
            "checkpoint of it. Put back plain layers of the names that its config gives, or load a checkpoint with "
            "load_state_dict into a model that you changed alike."
        )


def check_options(model: nn.Module, args: Any, save_dtype: str, casts: bool) -> None:
    """Refuse an order by length and half-precision adapters; warn of weights in half precision, and of fp16 on a CPU.

    Trainer takes batches by length in evaluations too: predictions would have another order than the images. DeepSpeed
    `casts` weights.
    """
    order = getattr(args, "train_sampling_strategy", "random")
    if order not in ("random", "sequential"):
        raise InputError(
            f"`train_sampling_strategy={order}` orders texts by their length, and would shuffle the images of an "
            "evaluation. Leave it out."
        )
    if args.fp16 and args.device.type == "cpu":
        logger.warning("`fp16=True` has no effect on a CPU: the training is in float32. Use `bf16=True`, or neither.")
    if save_dtype != "float32" and has_adapters(model):
        raise InputError("Adapters are saved in float32. Leave `save_dtype` out, or merge them first.")
    if casts:
        return
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            kind = str(parameter.dtype).removeprefix("torch.")
            logger.warning_once(
                f"The model's weights are {kind} ({name}): small updates round to nothing, and float16 overflows. "
                "Load it with from_pretrained(..., dtype=torch.float32), and set bf16=True for mixed precision."
            )
            return


def drop_gradients(model: nn.Module, heads: list[Head]) -> None:
    """Drop the gradients of all parameters but the heads'."""
    kept = {id(parameter) for head in heads for parameter in head.module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.grad = None


def begin_training(trainer: Any) -> None:
    """Refuse datasets without examples, and forget what an earlier training tried and built.

    Its optimizer knows neither new arguments nor parameters that were unfrozen since. One that the user gave stays.
    """
    for name, dataset in named_datasets(trainer).items():
        # Trainer evaluates on nothing without a word.
        if has_length(dataset) and len(dataset) == 0:
            raise InputError(f"The {name} dataset has no examples. Give it some, or leave it out.")
    trainer.attempts = 0
    trainer.reached.clear()
    # accelerate wraps it.
    if getattr(trainer.optimizer, "optimizer", trainer.optimizer) is trainer.own_optimizer:
        trainer.optimizer = None


def start_heads(
    model: nn.Module, config: EntameConfig, *, learning_rate: float, seed: int, batch_size: int, accumulation: int = 1
) -> None:
    """Apply ENTAME for a training, and warn where its settings work against it.

    Args:
        seed (`int`): the same seed draws the same heads on every device.
        batch_size (`int`): examples that one set of feature statistics is taken over, all processes together.
        accumulation (`int`, *optional*, defaults to 1): batches of that size that one update is made of.

    Raises:
        InputError: the model cannot be trained with this configuration and saved as its stock architecture.
    """
    heads = find_heads(model, config.head)
    for head in heads:
        if is_peft(model) and not head.module.weight.requires_grad:
            raise InputError(
                f"{head.path} is frozen, and an adapter's checkpoint would not hold it. Let peft train and save it: "
                f'LoraConfig(..., modules_to_save=["{head.path.removesuffix(".base_layer").rpartition(".")[2]}"]).'
            )
        if config.feature_norm:
            check_bias(head.path, head.module)
    # A generator of its own: the same seed gives the same head, and the order of the data stays what it was.
    generator = torch.Generator().manual_seed(seed)
    apply_entame(model, config, learning_rate=learning_rate, generator=generator)
    if config.init == "mei" and learning_rate > 0:
        classes = num_classes(heads[0].module)
        ratio = noise_to_signal_ratio(config, classes, learning_rate, batch_size * accumulation)
        message = f"Nλ² = {ratio:.3g}: noise over signal in the head's energy after a first plain gradient step."
        if ratio >= 1:
            logger.warning(
                f"{message} At 1 and above the noise is larger; a smaller `phi_w` or `noise_lambda` lowers it. Adam's "
                "first step is larger than a plain one."
            )
        else:
            logger.info(message)
