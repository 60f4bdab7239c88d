"""Learning rate schedules: warm-up and decay as fractions of total steps, and options that go together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from ..data import count_of
from ..errors import InputError

logger = logging.get_logger(__name__)

DECAY_STEPS = "num_decay_steps"


@contextmanager
def resolve_ratios(args: TrainingArguments, steps: int) -> Iterator[None]:
    """Turn warm-up and decay from fractions of `steps` into steps while this context lasts.

    `Trainer` does so for a warm-up, and takes all steps for it if there is one, by which some schedules divide by
    zero. It knows the decay of the schedule `warmup_stable_decay` in steps only. Schedules that follow a metric look
    for its maximum if `greater_is_better`. A schedule that does not take its options is explained in one line.
    """
    given = warmup, options = args.warmup_steps, args.lr_scheduler_kwargs
    if SchedulerType(args.lr_scheduler_type) in PLATEAU and args.greater_is_better:
        args.lr_scheduler_kwargs = {"mode": "max", **(options or {})}  # type: ignore[dict-item]
    if 0 < warmup < 1:
        args.warmup_steps = min(args.get_warmup_steps(steps), steps - 1)
    elif warmup >= steps and SchedulerType(args.lr_scheduler_type) not in WITHOUT_WARMUP:
        logger.warning(
            f"`warmup_steps={warmup:g}` covers the whole run ({count_of(steps, 'step')}): the learning rate never "
            "reaches its peak. For a tenth of the steps, set `warmup_steps=0.1`."
        )
    if isinstance(options, dict) and 0 < options.get(DECAY_STEPS, 0) < 1:
        counted: dict[str, Any] = {**options, DECAY_STEPS: math.ceil(options[DECAY_STEPS] * steps)}
        args.lr_scheduler_kwargs = counted
    try:
        with _explained_errors(args):
            yield
    finally:
        args.warmup_steps, args.lr_scheduler_kwargs = given


# transformers builds these without a warm-up.
WITHOUT_WARMUP = (SchedulerType.CONSTANT, SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)

# These follow a metric.
PLATEAU = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


def complete_schedule(args: TrainingArguments) -> None:
    """Make a schedule do what the other arguments ask for, where transformers would leave it out without a word.

    A warm-up turns `constant` into `constant_with_warmup`. Arguments change in place, so that logs and model cards
    tell what was used.
    """
    kind = SchedulerType(args.lr_scheduler_type)
    if args.warmup_steps > 0 and kind == SchedulerType.CONSTANT:
        args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
    elif args.warmup_steps > 0 and kind in WITHOUT_WARMUP:
        logger.warning(
            f"`warmup_steps={args.warmup_steps:g}` has no effect: `lr_scheduler_type={kind.value}` has no warm-up. "
            "Use another schedule, or `warmup_steps=0`."
        )


@contextmanager
def _explained_errors(args: TrainingArguments) -> Iterator[None]:
    """Explain in one line that a schedule does not take its options, or needs others."""
    try:
        yield
    except (TypeError, ValueError) as error:
        name, options = SchedulerType(args.lr_scheduler_type).value, json.dumps(args.lr_scheduler_kwargs or {})
        raise InputError(
            f"`lr_scheduler_type={name}` does not go with `lr_scheduler_kwargs={options}`: {error}. For a decay over "
            "the last fifth, set `lr_scheduler_type=warmup_stable_decay` and "
            f'`lr_scheduler_kwargs={{"{DECAY_STEPS}": 0.2}}`.'
        ) from error


@contextmanager
def explain_optimizer_errors(args: TrainingArguments) -> Iterator[None]:
    """Say in one sentence that an optimizer is not installed, or was given options which it does not have."""
    try:
        yield
    except InputError:
        raise
    except (ImportError, KeyError, TypeError, ValueError) as error:
        options = f" and `optim_args={args.optim_args}`" if args.optim_args else ""
        raise InputError(
            f"The optimizer of `optim={getattr(args.optim, 'value', args.optim)}`{options} cannot be built: {error}. "
            "For example: `optim=sgd` and `optim_args=momentum=0.9`."
        ) from error


def check_optimizer_options(args: TrainingArguments, optimizer: torch.optim.Optimizer | None) -> None:
    """Make sure that an optimizer of Trainer's has what `optim_args` says: Trainer drops what it does not know."""
    # Those of other packages take all options, or refuse them.
    if (
        optimizer is None
        or not args.optim_args
        or not type(optimizer).__module__.startswith(("torch.optim", "transformers."))
    ):
        return
    for name, value in (pair.split("=") for pair in args.optim_args.replace(" ", "").split(",")):
        if not all(name in group and _means(value, group[name]) for group in optimizer.param_groups):
            close = get_close_matches(name, optimizer.defaults.keys() - {name}, n=1)
            raise InputError(
                f"`optim_args`: {name}={value} has no effect on {type(optimizer).__name__}."
                + (f" Did you mean {close[0]}?" if close else "")
                + " Leave it out; learning rate, weight decay and betas are options of their own, such as "
                "`weight_decay=0.01`."
            )


def _means(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        # As transformers reads it; any other word is False.
        return text.lower() in (("true", "1", "yes") if value else ("false", "0", "no"))
    try:
        return float(text) == value
    except ValueError:
        return text == str(value)
