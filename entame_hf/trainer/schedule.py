"""Schedules of the learning rate that are told in shares of a training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType

from ..errors import InputError

DECAY_STEPS = "num_decay_steps"


@contextmanager
def resolve_ratios(args: TrainingArguments, steps: int) -> Iterator[None]:
    """Count the steps of warm-up and decay whose share of all steps the arguments give, while this context lasts.

    `Trainer` counts those of a warm-up, and takes all steps for it where there is one alone, by which some schedules
    divide by zero. The decay of the schedule `warmup_stable_decay` it knows in steps only.

    Args:
        args (`TrainingArguments`):
            `warmup_steps`, and `num_decay_steps` in `lr_scheduler_kwargs`, are shares if they are between 0 and 1.
        steps (`int`): how many optimizer steps the training will take.

    Example:

    ```python
    >>> args.warmup_steps, args.lr_scheduler_kwargs
    (0.1, {'num_decay_steps': 0.2})
    >>> with resolve_ratios(args, steps=90):
    ...     args.warmup_steps, args.lr_scheduler_kwargs
    (9, {'num_decay_steps': 18})
    ```
    """
    given = warmup, options = args.warmup_steps, args.lr_scheduler_kwargs
    if 0 < warmup < 1:
        args.warmup_steps = min(args.get_warmup_steps(steps), steps - 1)
    if isinstance(options, dict) and 0 < options.get(DECAY_STEPS, 0) < 1:
        counted: dict[str, Any] = {**options, DECAY_STEPS: math.ceil(options[DECAY_STEPS] * steps)}
        args.lr_scheduler_kwargs = counted
    try:
        yield
    finally:
        args.warmup_steps, args.lr_scheduler_kwargs = given


@contextmanager
def explain_scheduler_errors(args: TrainingArguments) -> Iterator[None]:
    """Say in one sentence that a schedule was given options which it does not have, or not those that it needs.

    Raises:
        InputError: transformers' function of the schedule does not take `lr_scheduler_kwargs`.
    """
    try:
        yield
    except TypeError as error:
        name, options = SchedulerType(args.lr_scheduler_type).value, json.dumps(args.lr_scheduler_kwargs or {})
        raise InputError(
            f"--lr_scheduler_type {name} cannot be made of --lr_scheduler_kwargs '{options}': {error}. A decay over "
            "the last fifth, for example: --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs "
            f"'{{\"{DECAY_STEPS}\": 0.2}}'."
        ) from error
