"""Runs and models that are spread over processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Optimizer
from transformers import TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.utils import logging

from ..config import EntameConfig
from ..errors import InputError

logger = logging.get_logger(__name__)


def check_processes(args: TrainingArguments) -> None:
    """Make sure that processes which were started together train together, and that one process uses one GPU.

    Args:
        args (`TrainingArguments`): several GPUs in one process are reduced to one, with a warning.

    Raises:
        InputError: several processes were started that do not know of each other, or that would look for a batch size
            each by itself.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and args.world_size == 1:
        raise InputError(
            f"{launched} processes were started, and each would train alone and write to the same folder. Without a "
            "GPU, pass use_cpu=True (--use_cpu True); otherwise check that every process sees its GPU."
        )
    if args.world_size > 1 and args.auto_find_batch_size:
        raise InputError(
            "auto_find_batch_size works in one process: where one of several runs out of memory, the others would "
            "wait for ever. Give per_device_train_batch_size alone."
        )
    if args.use_cpu and dist.group.WORLD is not None:
        # transformers passes it on for accelerators only.
        dist.group.WORLD.set_timeout(args.ddp_timeout_delta)
    if args.n_gpu > 1:
        logger.warning(
            f"Using one of {args.n_gpu} GPUs: DataParallel keeps no feature statistics. "
            "To use them all, start with: accelerate launch your_script.py"
        )
        args._n_gpu = 1


def share_buffers(model: nn.Module) -> None:
    """Give all processes the first one's buffers: each has moved its running statistics by its own images."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer.detach(), 0)


@contextmanager
def whole_models(args: TrainingArguments) -> Iterator[None]:
    """Let transformers load models whole while this context lasts, though the arguments ask for ZeRO-3.

    It would partition them as soon as those arguments exist, and then refuse a head for another number of classes.
    DeepSpeed takes whole models apart when the training begins.
    """
    plugin = args.deepspeed_plugin
    if plugin is None:
        yield
        return
    config = getattr(args, "hf_deepspeed_config", None) or plugin.dschf
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


def normalise_in_float32(model: nn.Module) -> None:
    """Let batch normalisation compute with its weights in float32, as its running statistics are.

    DeepSpeed and FSDP2 cast parameters to half precision and leave buffers as they are, which torch does not take
    together, or in the forward alone.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            # A partial survives copies and pickles.
            vars(module)["forward"] = partial(_in_float32, module)


def _in_float32(module: nn.Module, *inputs: Tensor) -> Tensor:
    own = vars(module)["_parameters"]
    vars(module)["_parameters"] = {name: p if p is None else p.float() for name, p in own.items()}
    try:
        return type(module).forward(module, *inputs)
    finally:
        vars(module)["_parameters"] = own


def check_sharding(
    accelerator: Accelerator, config: EntameConfig, warmup_steps: int, measures_head_lr: bool = False
) -> None:
    """Refuse what cannot be done to a model that is sharded over processes.

    Args:
        accelerator ([`~accelerate.Accelerator`]): it knows how the model will be sharded.
        config ([`EntameConfig`]): what is done to the heads.
        warmup_steps (`int`): steps that update the heads alone.
        measures_head_lr (`bool`, *optional*, defaults to `False`): whether the first step sets the heads' rate.

    Raises:
        InputError: the setting would silently do nothing, or no checkpoint could be written.
    """
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if fsdp is None and deepspeed is None:
        return
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise InputError("FSDP's first version hides the heads. Use the second: accelerate launch --fsdp_version 2.")
    if fsdp is not None and "FULL_STATE_DICT" not in str(fsdp.state_dict_type):
        raise InputError(
            "With sharded state dicts nobody writes a model that loads elsewhere: "
            "accelerate launch --fsdp_state_dict_type FULL_STATE_DICT."
        )
    if fsdp is not None and fsdp.cpu_ram_efficient_loading and config.feature_norm:
        raise InputError(
            "accelerate's efficient loading fails on models with buffers, such as feature statistics: "
            "accelerate launch --fsdp_cpu_ram_efficient_loading false."
        )
    if config.init == "keep" and config.feature_norm:
        raise InputError('A sharded head cannot be carried over to normalised features. Use entame_method="keep".')
    if deepspeed is not None and warmup_steps:
        raise InputError(
            "DeepSpeed keeps the gradients to itself, so the backbone cannot be left out of the first steps. Use "
            "FSDP (accelerate launch --fsdp_version 2) or head_warmup_steps=0."
        )
    if deepspeed is not None and measures_head_lr:
        raise InputError(
            "DeepSpeed takes its steps within the backward, before a rate that was measured could be set. Give the "
            "rate, such as head_lr=1e-3, or use FSDP (accelerate launch --fsdp_version 2)."
        )


def check_optimizer(accelerator: Accelerator, optimizer: Optimizer) -> None:
    """Refuse an optimizer that could not be restored from the checkpoints which are written of it.

    Args:
        accelerator ([`~accelerate.Accelerator`]): it knows how the model will be sharded.
        optimizer (`torch.optim.Optimizer`): what will train.

    Raises:
        InputError: the optimizer keeps nothing from step to step, and parameters are sharded by FSDP:
            `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict` asks for a tensor to tell the device by.
    """
    if getattr(accelerator.state, "fsdp_plugin", None) is None or not isinstance(optimizer, SGD):
        return
    if not any(group["momentum"] for group in optimizer.param_groups):
        raise InputError(
            "torch cannot restore SGD without momentum under FSDP, so no training could go on from its checkpoints. "
            "Give momentum, --optim_args momentum=0.9, or save none, --save_strategy no."
        )
