"""How a training starts: heads drawn, features normalised, doubtful settings said before any time is spent."""

from __future__ import annotations

import torch
from torch import nn
from transformers.utils import logging

from ..config import EntameConfig, noise_to_signal_ratio
from ..errors import InputError
from ..heads import find_heads, is_peft, num_classes
from ..patch import NO_BIAS, applied_config, apply_entame

logger = logging.get_logger(__name__)

# Below this, the statistics of one batch are too noisy to evaluate with.
SMALL_BATCH = 64


def start_heads(
    model: nn.Module,
    config: EntameConfig,
    *,
    learning_rate: float,
    seed: int,
    batch_size: int,
    accumulation: int = 1,
) -> None:
    """Apply ENTAME for a training, and warn where its settings work against it.

    Args:
        model (`torch.nn.Module`): see [`find_heads`]; changed in place.
        config ([`EntameConfig`]): what is done to its heads.
        learning_rate (`float`): γ, the peak learning rate.
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
        if config.feature_norm and head.module.bias is None:
            raise InputError(NO_BIAS.format(path=head.path))
    before = applied_config(model)
    if before is not None and before != config:
        logger.warning(
            f"The heads were treated with {before}, and are now with {config}, which the trainer was given. To train "
            "with the former, give the trainer neither a method nor values for it."
        )
    # A generator of its own: the same seed gives the same head, and the order of the data stays what it was.
    generator = torch.Generator().manual_seed(seed)
    apply_entame(model, config, learning_rate=learning_rate, generator=generator)
    if config.feature_norm and config.momentum == 1 and batch_size < SMALL_BATCH:
        logger.warning(
            f"Evaluation will use the feature statistics of one batch of {batch_size}, which is noisy: "
            f"below {SMALL_BATCH}, pass EntameTrainingArguments(znorm_momentum=0.1)."
        )
    if config.init == "mei" and learning_rate > 0:
        classes = num_classes(heads[0].module)
        share = noise_to_signal_ratio(config, classes, learning_rate, batch_size * accumulation)
        message = f"Nλ² = {share:.3g}: the share of noise in the head's energy after a first plain gradient step."
        if share >= 1:
            logger.warning(
                f"{message} At 1 and above, most of it; a smaller phi_w or noise_lambda lowers it. Adam's first "
                "step is larger than a plain one."
            )
        else:
            logger.info(message)
