"""Training arguments with the paper's defaults."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, get_args

from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from .config import EntameConfig, Method
from .errors import InputError, unknown_value

AUTO = "auto"

# What a recipe says where the arguments say nothing.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": None, "warmup_steps": 0},
    "recommended": {
        "entame_method": "entame",
        "head_lr": AUTO,
        "freeze_statistics": True,
        # At its peak for most of a run, and 0 at its end.
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 0.2, "decay_type": "linear"},
        "warmup_steps": 0.05,
    },
}

# The fields of `EntameConfig` that an argument sets, by the argument's name.
CONFIG_FIELDS = {"phi_w": "phi_w", "noise_lambda": "noise_lambda", "znorm_momentum": "momentum", "znorm_sync": "sync"}

_LARGEST, _FINITE, _POSITIVE = 2**31 - 1, sys.float_info.max, math.ulp(0.0)

# The least and the largest value of the options that are numbers.
BOUNDS: dict[str, tuple[float, float]] = {
    name: (least, largest)
    for names, least, largest in (
        ("learning_rate weight_decay adam_epsilon warmup_steps eval_delay", 0, _FINITE),
        ("num_train_epochs head_lr_multiplier", _POSITIVE, _FINITE),
        ("logging_steps eval_steps save_steps", _POSITIVE, _LARGEST),
        ("adam_beta1 adam_beta2 label_smoothing_factor", 0, 1),
        ("znorm_momentum", _POSITIVE, 1),
        ("per_device_train_batch_size per_device_eval_batch_size", 1, _LARGEST),
        ("gradient_accumulation_steps informed_samples", 1, _LARGEST),
        ("dataloader_num_workers znorm_refresh_samples head_warmup_steps energy_logging_steps", 0, _LARGEST),
        # NumPy takes no others.
        ("seed data_seed", 0, 2**32 - 1),
        # -1 means num_train_epochs.
        ("max_steps", -1, _LARGEST),
        # Infinity measures the norm without clipping.
        ("max_grad_norm", 0, math.inf),
    )
    for name in names.split()
}

# Options that may be fractions.
FRACTIONS = ("learning_rate", "weight_decay", "warmup_steps", "num_train_epochs", "label_smoothing_factor")

SAVE_DTYPES = ["float32", "bfloat16", "float16"]

# Argument parsers read an option without a value as True.
FLAG = {"nargs": "?", "const": True}


def option(default: Any, text: str, *choices: str, **parsing: Any) -> Any:
    """Declare an option: its default, its line in `--help`, and the values that it may have."""
    return field(
        default=default, metadata={"help": text, **({"choices": list(choices)} if choices else {}), **parsing}
    )


def check_numbers(args: Any, bounds: dict[str, tuple[float, float]] = BOUNDS) -> None:
    """Refuse options that are no numbers within their bounds; one that is `None` is not set."""
    for name, (least, largest) in bounds.items():
        value = getattr(args, name, None)
        within = isinstance(value, Real) and least <= float(value) <= largest and (name, value) != ("max_steps", 0)
        if value is None or within:
            continue
        allowed = "positive" if least == _POSITIVE else "-1, or 1 or more" if least == -1 else f"{least} or more"
        limit = "" if largest == math.inf else ", and finite" if largest == _FINITE else f", and at most {largest}"
        if not isinstance(value, Real):
            value, allowed = repr(value), f"a number, {allowed}"
        raise InputError(f"`{name}={value}` must be {allowed}{limit}.")


@dataclass(repr=False)
class HeadArguments:
    """Hold the options of the heads. `None` means "not set"; the methods say what counts then.

    [`EntameTrainer`] uses the defaults if it gets plain `TrainingArguments`.
    """

    recipe: str = option("paper", f"{' or '.join(RECIPES)}. Options that you set override the recipe.", *RECIPES)
    entame_method: str | None = option(
        None,
        f"How the head starts: {', '.join(get_args(Method))}. Defaults to the config that apply_entame got, else to "
        "entame.",
        *get_args(Method),
    )
    phi_w: float | None = option(None, "φ_w, the variance of the head's initial weights; 1e-12 by default.")
    noise_lambda: float | None = option(None, "λ: φ_w = (learning_rate · λ / classes)², instead of phi_w.")
    znorm_momentum: float | None = option(
        None, "How far a full batch moves the feature statistics used in evaluation, in (0, 1]; 1 by default."
    )
    znorm_sync: bool | None = option(
        None, "Normalise features over the batch of all processes together; True by default.", **FLAG
    )
    head_lr_multiplier: float | None = option(None, "The head learning rate over learning_rate; 1 in the paper.")
    # In this order, HfArgumentParser takes it for a string.
    head_lr: float | str | None = option(
        None,
        "The heads' peak learning rate, instead of head_lr_multiplier: a number, or auto to measure it in the first "
        "step.",
    )
    head_warmup_steps: int | None = option(
        None, "Optimizer steps that update the heads only; by default 1 for base_wu and 0 otherwise."
    )
    freeze_backbone: bool = option(False, "Linear probing: freeze the backbone and train the heads only.")
    freeze_statistics: bool | None = option(
        None, "Freeze the backbone's BatchNorm running statistics, and normalise by them.", **FLAG
    )
    znorm_refresh_samples: int | None = option(
        None,
        "Re-estimate the feature statistics on so many training images before evaluating and saving; 0 keeps the last "
        "batch's. Default: 1,000 if batches are below 128, else 0.",
    )
    informed_samples: int = option(
        50_000, "Training images that entame_method=informed fits the head to, before the first step."
    )
    save_dtype: str = option("float32", "Type of the final weights; checkpoints stay float32.", *SAVE_DTYPES)
    energy_logging_steps: int = option(
        20, "Measure the error of so many first steps, then of the logged ones. 0 turns it off."
    )

    def resolve(self, name: str) -> Any:
        """Get an option's value; the recipe's if it is not set. Setting `head_lr_multiplier` sets `head_lr` too."""
        value = getattr(self, name)
        is_set = value is not None or (name == "head_lr" and self.head_lr_multiplier is not None)
        return value if is_set else RECIPES[self.recipe].get(name)

    def entame_config(self, applied: EntameConfig | None = None) -> EntameConfig:
        """Build the config of the heads.

        Options that are set override fields of `applied`, the config that [`apply_entame`] got; `entame_method`
        overrides all of them but `head`, which says where the heads are.
        """
        values = {name: getattr(self, argument) for argument, name in CONFIG_FIELDS.items()}
        changes = {name: value for name, value in values.items() if value is not None}
        if "phi_w" in changes:
            changes.setdefault("noise_lambda", None)
        if self.entame_method is None and applied is not None:
            return replace(applied, **changes)
        method: Any = self.resolve("entame_method") or "entame"
        return EntameConfig.for_method(method, **changes, head=None if applied is None else applied.head)

    def sets_config(self) -> bool:
        """Tell whether an option is set that [`EntameConfig`] has."""
        return any(getattr(self, name) is not None for name in ("entame_method", *CONFIG_FIELDS))

    def peak_head_lr(self, learning_rate: float) -> float | str | None:
        """Get the heads' peak learning rate: a number, `"auto"`, or `None` if they have none of their own."""
        rate = self.resolve("head_lr")
        if rate is None:
            factor = self.head_lr_multiplier or 1
            return None if factor == 1 else learning_rate * factor
        # A hyperparameter search that starts from "auto" passes its numbers as strings.
        return AUTO if rate == AUTO else float(rate)

    def warmup_steps_of_head(self) -> int:
        """Get `head_warmup_steps`: Base+WU is Base with one warm-up step."""
        default = 1 if self.entame_method == "base_wu" else 0
        return default if self.head_warmup_steps is None else self.head_warmup_steps


# TrainingArguments hide the token in theirs.
@dataclass(repr=False)
class EntameTrainingArguments(HeadArguments, TrainingArguments):
    """Set up a fine-tuning run with ENTAME: `TrainingArguments` with the paper's defaults and the heads' options.

    The defaults are the paper's: a constant learning rate of 1e-4 and Adam without weight decay. Three defaults of
    `TrainingArguments` change: `remove_unused_columns=False`, because transforms read the image column;
    `logging_nan_inf_filter=False` and `ddp_broadcast_buffers=False`, because both take time in every step.

    Args:
        recipe (`str`, *optional*, defaults to `"paper"`):
            `"paper"` is a constant learning rate. `"recommended"` sets `entame_method="entame"`, `head_lr="auto"`,
            `freeze_statistics=True`, `warmup_steps=0.05`, and `lr_scheduler_type="warmup_stable_decay"` with
            `lr_scheduler_kwargs={"num_decay_steps": 0.2, "decay_type": "linear"}`. Options that you set override the
            recipe, and so does the config that [`apply_entame`] got.
        entame_method (`str`, *optional*):
            `"base"`, `"base_wu"`, `"mei"`, `"fn"`, `"entame"`, `"informed"` or `"keep"`; see
            [`EntameConfig.for_method`]. Defaults to the config that [`apply_entame`] got, else to `"entame"`.
        phi_w (`float`, *optional*): φ_w, the variance of the head's initial weights. Defaults to 1e-12.
        noise_lambda (`float`, *optional*): λ, which replaces `phi_w` by (γλ/C)² with γ = `learning_rate`.
        znorm_momentum (`float`, *optional*, defaults to 1):
            How far a full batch moves the feature statistics that evaluation uses; in (0, 1].
        znorm_sync (`bool`, *optional*, defaults to `True`):
            Whether features are normalised over the batch of all processes together.
        head_lr_multiplier (`float`, *optional*, defaults to 1): the head learning rate over `learning_rate`.
        head_lr (`float` or `"auto"`, *optional*):
            The heads' own peak learning rate; they share the schedule of `learning_rate`. `"auto"` measures it in the
            first step: δ / E‖x‖₁ for Adam and its kin, with δ = 0.5 and x the classifier's input, so that a step moves
            its logits by at most about δ; see [`HeadRates`], for SGD too. Not together with `head_lr_multiplier`.
        head_warmup_steps (`int`, *optional*):
            Optimizer steps that update the heads only. Defaults to 1 for `"base_wu"` and to 0 otherwise.
        freeze_backbone (`bool`, *optional*, defaults to `False`):
            Linear probing: freeze the backbone's parameters and running statistics, and train the heads only.
        freeze_statistics (`bool`, *optional*, defaults to `False`):
            Freeze the backbone's BatchNorm running statistics, and normalise by them: see [`frozen_statistics`].
        znorm_refresh_samples (`int`, *optional*):
            Re-estimate the feature statistics on so many training images, with the current weights, before each
            evaluation and checkpoint and at the end. 0 keeps those that training left. Defaults to 1,000 if these are
            the last batch's and it has fewer than 128 images, which is too noisy to evaluate with, and to 0 otherwise.
        informed_samples (`int`, *optional*, defaults to 50,000):
            Training images that `entame_method="informed"` fits the head to, with the classes' proportions.
        save_dtype (`str`, *optional*, defaults to `"float32"`):
            The type of the weights that `save_model` writes: `"float32"`, `"bfloat16"` or `"float16"`. Running
            statistics, and the checkpoints that a run resumes from, stay float32.
        energy_logging_steps (`int`, *optional*, defaults to 20):
            Measure and log the error of so many first steps, then of the logged ones: see [`EnergyRecorder`].

    Raises:
        InputError: a value is outside of its domain; the message names what is allowed.

    Example:

    ```python
    >>> from entame_hf import EntameTrainingArguments

    >>> EntameTrainingArguments("out", entame_method="mei", report_to="none").learning_rate
    0.0001
    ```
    """

    learning_rate: float = option(1e-4, "γ, the peak learning rate.")
    # None means the recipe's; __post_init__ fills both.
    lr_scheduler_type: str | None = option(  # type: ignore[assignment]
        None, "The schedule of the learning rate; by default the recipe's: constant in paper."
    )
    warmup_steps: float | None = option(  # type: ignore[assignment]
        None,
        "Steps in which the learning rate rises to its peak, or their share below 1; by default the recipe's: 0 in "
        "paper.",
    )
    remove_unused_columns: bool = option(False, "Whether to remove columns that the model's forward does not name.")
    # For it, the host waits for the device in every step.
    logging_nan_inf_filter: bool = option(
        False, "Whether losses that are NaN or infinite are left out of the logged mean, at a step's cost."
    )
    # An evaluation begins with it, and what is saved are the first process's own.
    ddp_broadcast_buffers: bool | None = option(
        False, "Whether DDP sends the first process's buffers to the others in every step."
    )

    def __post_init__(self) -> None:
        # With DeepSpeed, Trainer refuses the precision that a launcher asked for if the arguments do not name it.
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        unnamed = launched in ("bf16", "fp16") and not (self.bf16 or self.fp16)
        if unnamed and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            setattr(self, launched, True)
        if self.output_dir == "" or "\0" in str(self.output_dir):
            raise InputError(f"`output_dir={self.output_dir!r}` names no folder. Give one, such as `output_dir=out`.")
        self.check()
        self._fill_schedule()
        for name in FRACTIONS:
            # A search casts its numbers to the type that it finds: the int 0 would make 0.1 a 0.
            if type(value := getattr(self, name)) is int:
                setattr(self, name, float(value))
        super().__post_init__()
        with suppress(TypeError, ValueError):
            # HfArgumentParser leaves it a string.
            self.head_lr = self.head_lr and float(self.head_lr)

    def check(self) -> None:
        """Check the options of the package, and all that are numbers; they may have been set since.

        Raises:
            InputError: a value is outside of its domain, or the recipe is another than the schedule's.
        """
        if self.recipe not in RECIPES:
            raise InputError(unknown_value("`recipe`:", self.recipe, RECIPES))
        filled = vars(self).get("_filled", self.recipe)
        if filled != self.recipe:
            raise InputError(
                f"`recipe={self.recipe}` was set after the arguments were built, and their schedule is that of "
                f"{filled}. Pass it to EntameTrainingArguments; in a search, set `entame_method`, `head_lr` and "
                "`lr_scheduler_type` instead."
            )
        check_numbers(self)
        if self.save_dtype not in SAVE_DTYPES:
            raise InputError(unknown_value("`save_dtype`:", self.save_dtype, SAVE_DTYPES))
        if self.phi_w is not None and self.noise_lambda is not None:
            raise InputError("`noise_lambda` stands in the place of `phi_w`: give one of them.")
        self.entame_config()
        self._check_head_lr()

    def _fill_schedule(self) -> None:
        """Take the schedule from the recipe: Trainer reads these fields, so they cannot stay `None`."""
        self._filled = self.recipe
        recipe = RECIPES["paper"] | RECIPES[self.recipe]
        if self.lr_scheduler_type is None:
            self.lr_scheduler_type = recipe["lr_scheduler_type"]
            self.lr_scheduler_kwargs = self.lr_scheduler_kwargs or copy(recipe["lr_scheduler_kwargs"])
        if self.warmup_steps is None:
            self.warmup_steps = recipe["warmup_steps"]

    def _check_head_lr(self) -> None:
        if self.head_lr is not None and self.head_lr_multiplier is not None:
            raise InputError(
                f"head_lr={self.head_lr} and head_lr_multiplier={self.head_lr_multiplier} both set the head learning "
                "rate: set one of them. head_lr is the rate itself, head_lr_multiplier its ratio to learning_rate."
            )
        rate = self.resolve("head_lr")
        if rate == AUTO and self.learning_rate == 0:
            raise InputError(
                'head_lr="auto" shares the schedule of learning_rate, which is 0. To train the heads alone, pass '
                "freeze_backbone=True and a positive learning_rate."
            )
        if rate in (None, AUTO):
            return
        value = 0.0
        with suppress(TypeError, ValueError):
            value = float(rate)
        if not 0 < value < math.inf:
            raise InputError(
                f'head_lr={self.head_lr!r} must be "auto", which measures it in the first step, or a positive number, '
                "such as 1e-3."
            )
