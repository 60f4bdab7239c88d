"""Runs and models that are spread over processes and hosts."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from logging import ERROR, StreamHandler, getLogger
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from transformers import TrainingArguments
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ..config import EntameConfig
from ..errors import InputError
from ..patch import BATCH_NORMS

logger = logging.get_logger(__name__)


def check_processes(args: TrainingArguments) -> None:
    """Check that processes that were started together train together, and that each uses one GPU."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and args.world_size == 1:
        raise InputError(
            f"{launched} processes were started, and each would train alone and write to the same folder. Without a "
            "GPU, set `use_cpu=True`; otherwise check that every process sees its GPU."
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


def set_log_level(args: TrainingArguments) -> None:
    """Let `log_level` reach this package's loggers, and let the main process alone warn.

    With `log_level="passive"`, the main process keeps the level that was set, or a lower one of transformers.
    """
    ours = getLogger(__name__.partition(".")[0])
    if not ours.hasHandlers():
        # As transformers' own; Python shows nothing below a warning without one.
        ours.addHandler(StreamHandler())
    level = args.get_process_log_level()
    if args.process_index > 0:
        ours.setLevel(ERROR if args.log_level_replica == "warning" else level)
    elif args.log_level != "passive":
        ours.setLevel(level)
    elif logging.get_verbosity() < ours.getEffectiveLevel():
        ours.setLevel(logging.get_verbosity())


def share_buffers(model: nn.Module) -> None:
    """Send rank 0's buffers to all ranks: each has moved its running statistics by its own images."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer.detach(), 0)


@contextmanager
def zero3_init_disabled(args: TrainingArguments) -> Iterator[None]:
    """Keep transformers from sharding models while it loads them, though the arguments ask for ZeRO-3.

    A sharded head cannot be replaced by one for another number of classes. DeepSpeed shards the model when training
    begins.
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
        if isinstance(module, BATCH_NORMS):
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
    """Refuse what would silently do nothing to a model that is sharded, or could not be saved."""
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if fsdp is None and deepspeed is None:
        return
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise InputError("FSDP's first version hides the heads. Use the second: accelerate launch --fsdp_version 2.")
    if fsdp is not None and "FULL_STATE_DICT" not in str(fsdp.state_dict_type):
        raise InputError(
            "Sharded state dicts give no model that loads elsewhere: "
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
            "rate, such as `head_lr=1e-3`, or use FSDP (accelerate launch --fsdp_version 2)."
        )


def check_optimizer(args: TrainingArguments, accelerator: Accelerator, optimizer: Optimizer) -> None:
    """Refuse an optimizer without state under FSDP if checkpoints are saved: torch could not restore it."""
    sharded = getattr(accelerator.state, "fsdp_plugin", None) is not None
    if args.save_strategy == SaveStrategy.NO or not sharded or not isinstance(optimizer, SGD):
        return
    if not any(group["momentum"] for group in optimizer.param_groups):
        raise InputError(
            "torch cannot restore SGD without momentum under FSDP, so no run could resume from its checkpoints. "
            "Set `optim_args=momentum=0.9`, or save none with `save_strategy=no`."
        )


def are_several() -> bool:
    """Tell whether this job's processes are on several hosts, as the launcher has it."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return world > int(os.environ.get("LOCAL_WORLD_SIZE", world))


def same_on_all(find: Callable[[], str]) -> str:
    """Find a file or folder on every process, so that all ranks resume or none does.

    `find` returns a path, which may differ between hosts in all but its name.

    Raises:
        InputError: on every process, where one of them has not found it, or another one.
    """
    found, reason = "", None
    try:
        found = find()
    except InputError as error:
        reason = str(error)
    # Absolute, as the current folder is ".".
    answers = gather_object([(Path(found).absolute().name if reason is None else "", reason)])
    first = next((rank for rank, (name, _) in enumerate(answers) if name), None)
    if first is None:
        raise InputError(reason)
    expected = answers[first][0]
    for rank, (name, why) in enumerate(answers):
        if name != expected:
            raise InputError(
                f"Rank {first} would resume from {expected}, and rank {rank} from {name or f'nothing ({why})'}. All "
                "hosts must have the same: give one that they all have, or copy it to the output folder of each."
            )
    return found


def check_output_folder(args: TrainingArguments) -> None:
    """Check, before a run on several hosts, that all of them can read what the first one writes."""
    if not are_several():
        return
    if args.save_on_each_node:
        raise InputError(
            "save_on_each_node=True leaves checkpoints without weights on all hosts but the first one. Leave it out, "
            "and give an output_dir that all hosts see."
        )
    folder = Path(str(args.output_dir))
    folder.mkdir(parents=True, exist_ok=True)
    # A name that nobody has looked for: a network's file system may remember for a while that a file is missing.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as file:
        (name,) = broadcast_object_list([Path(file.name).name])
        shared = all(gather_object([(folder / name).exists()]))
    if shared:
        return
    if args.load_best_model_at_end:
        raise InputError(
            f"load_best_model_at_end=True needs the best checkpoint on every host, and the first one alone writes it, "
            f"to {folder}. Give an output_dir that all hosts see."
        )
    if args.save_strategy != "no" and args.process_index == 0:
        logger.warning(
            f"Other hosts do not see {folder}: this one alone keeps checkpoints, and a killed run resumes "
            "from one that every host has. Give an output_dir that all hosts see, or copy the last checkpoint to each "
            f"of them before you resume with resume_from_checkpoint=True."
        )
