"""Training arguments with the paper's defaults."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Any, get_args

from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from .config import EntameConfig, Method

AUTO = "auto"

# What a recipe fills in where the arguments leave it open.
RECIPES: dict[str, dict[str, Any]] = {
    "paper": {"lr_scheduler_type": "constant", "lr_scheduler_kwargs": None, "warmup_steps": 0},
    "recommended": {
        "entame_method": "entame",
        "head_lr": AUTO,
        "freeze_statistics": True,
        # At its peak for most of a training, and 0 at its end.
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 0.2, "decay_type": "linear"},
        "warmup_steps": 0.05,
    },
}


@dataclass
class HeadArguments:
    """Hold what [`EntameTrainer`] needs beyond `TrainingArguments`; with these defaults where it gets the latter."""

    recipe: str = field(
        default="paper",
        metadata={
            "help": f"{' or '.join(RECIPES)}. Options that are given go before it.",
        },
    )
    entame_method: str | None = field(
        default=None,
        metadata={
            "help": f"What happens to the head: {', '.join(get_args(Method))}. By default what apply_entame was "
            "given, else entame."
        },
    )
    phi_w: float = field(default=1e-12, metadata={"help": "φ_w, the variance of the head's initial weights."})
    noise_lambda: float | None = field(
        default=None, metadata={"help": "λ: φ_w = (learning_rate · λ / classes)², instead of phi_w."}
    )
    znorm_momentum: float = field(
        default=1.0,
        metadata={"help": "How far a full batch moves the feature statistics used in evaluation; in (0, 1]."},
    )
    znorm_sync: bool = field(
        default=True, metadata={"help": "Normalise features over the batch of all processes together."}
    )
    head_lr_multiplier: float = field(
        default=1.0, metadata={"help": "The heads' learning rate over the backbone's; 1 is the paper."}
    )
    # In this order, HfArgumentParser takes it for a string.
    head_lr: float | str | None = field(
        default=None,
        metadata={
            "help": "The heads' peak learning rate, instead of head_lr_multiplier: a number, or auto to measure it in "
            "the first step."
        },
    )
    head_warmup_steps: int | None = field(
        default=None,
        metadata={"help": "Optimizer steps that update the heads only; by default 1 for base_wu and 0 otherwise."},
    )
    freeze_backbone: bool = field(
        default=False, metadata={"help": "Train the heads alone, on features that stand still: linear probing."}
    )
    freeze_statistics: bool | None = field(
        default=None,
        metadata={
            "help": "Batch normalisation keeps the running statistics that it came with, and normalises by them in "
            "training.",
            # An option without a value, as those that are False by default are.
            "nargs": "?",
            "const": True,
        },
    )
    energy_logging_steps: int = field(
        default=20,
        metadata={"help": "First steps whose error is measured, each; then those that are logged. 0 is off."},
    )

    # What a recipe has filled in for entame_method, which nobody has chosen.
    recipes_method: str | None = field(default=None, init=False, repr=False)

    def leaves_config_open(self) -> bool:
        """Tell whether nobody but a recipe said anything of the heads: then what [`apply_entame`] was given counts."""
        if self.entame_method not in (None, self.recipes_method):
            return False
        return self.entame_config() == EntameConfig.for_method(self.entame_method or "entame")  # type: ignore[arg-type]

    def warmup_steps_of_head(self) -> int:
        """Resolve `head_warmup_steps`: Base+WU is Base with one warm-up step."""
        if self.head_warmup_steps is None:
            return 1 if self.entame_method == "base_wu" else 0
        return self.head_warmup_steps

    def peak_head_lr(self, learning_rate: float) -> float | str | None:
        """Resolve the heads' peak learning rate: a number, `"auto"`, or None for that of all parameters."""
        if self.head_lr is None:
            return None if self.head_lr_multiplier == 1 else learning_rate * self.head_lr_multiplier
        # A search for hyper-parameters that starts from "auto" gives its numbers as strings.
        return AUTO if self.head_lr == AUTO else float(self.head_lr)

    def entame_config(self) -> EntameConfig:
        """Build the head's configuration, which checks the values it is made of."""
        return EntameConfig.for_method(
            self.entame_method or "entame",  # type: ignore[arg-type]
            phi_w=self.phi_w,
            noise_lambda=self.noise_lambda,
            momentum=self.znorm_momentum,
            sync=self.znorm_sync,
        )


@dataclass
class EntameTrainingArguments(HeadArguments, TrainingArguments):
    """Set up a fine-tuning run with ENTAME: `TrainingArguments` with the paper's defaults and the head's options.

    The learning rate is 1e-4 and constant, the optimizer Adam without weight decay, and no column of the data set is
    removed, because transforms need the image column. Losses that are NaN are logged as such, and processes share
    running statistics when they evaluate: both cost time in every step otherwise.

    Args:
        recipe (`str`, *optional*, defaults to `"paper"`):
            `"recommended"` is ENTAME with a measured learning rate of the head, on running statistics that stand
            still, with a warm-up over a twentieth of the steps and a linear decay over the last fifth, each where it
            is not given: `entame_method="entame"`, `head_lr="auto"`, `freeze_statistics=True`, `warmup_steps=0.05`,
            and `lr_scheduler_type="warmup_stable_decay"` with `lr_scheduler_kwargs={"num_decay_steps": 0.2,
            "decay_type": "linear"}`. `"paper"` is a constant rate. What [`apply_entame`] was given goes before a
            recipe's method.
        entame_method (`str`, *optional*):
            `"base"`, `"base_wu"`, `"mei"`, `"fn"`, `"entame"` or `"keep"`; see [`EntameConfig.for_method`]. Defaults
            to what [`apply_entame`] was given, and to `"entame"` where it was not called.
        phi_w (`float`, *optional*, defaults to 1e-12): φ_w, the variance of the head's initial weights.
        noise_lambda (`float`, *optional*): λ, which replaces `phi_w` by (γλ/C)² with γ = `learning_rate`.
        znorm_momentum (`float`, *optional*, defaults to 1.0):
            How far a full batch moves the feature statistics that evaluation uses; in (0, 1].
        znorm_sync (`bool`, *optional*, defaults to `True`):
            Whether features are normalised over the batch of all processes together.
        head_lr_multiplier (`float`, *optional*, defaults to 1.0):
            The heads' learning rate over the backbone's, in a parameter group of their own.
        head_lr (`float` or `"auto"`, *optional*):
            The heads' own peak learning rate, whatever `learning_rate` is; they share its schedule. `"auto"` measures
            it in the first step: δ / E‖x‖₁ for Adam and its kin, with δ = 0.5 and x what the classifier multiplies,
            so that a step moves its logits by at most about δ; see [`HeadRates`], for SGD too. Not together with
            `head_lr_multiplier`.
        head_warmup_steps (`int`, *optional*):
            Optimizer steps that update the heads only. Defaults to 1 for `"base_wu"` and to 0 otherwise.
        freeze_backbone (`bool`, *optional*, defaults to `False`):
            Linear probing, the paper's feature extraction: the heads alone learn, and the backbone's parameters and
            running statistics stand still.
        freeze_statistics (`bool`, *optional*):
            Whether the backbone's batch normalisation keeps the running statistics that it came with, and normalises
            by them in training as in evaluation; its weights learn. See [`frozen_statistics`]. By default it does not.
        energy_logging_steps (`int`, *optional*, defaults to 20):
            Measure and log the error of so many first steps, see [`EnergyRecorder`], and then of the steps whose loss
            is logged; 0 turns it off.

    Raises:
        ValueError: a value is outside of its domain; the message names what is allowed.

    Example:

    ```python
    >>> from entame_hf import EntameTrainingArguments

    >>> EntameTrainingArguments("out", entame_method="mei", report_to="none").learning_rate
    0.0001
    ```
    """

    learning_rate: float = field(default=1e-4, metadata={"help": "γ, the peak learning rate."})
    # None is for the recipe to decide: afterwards, neither is None.
    lr_scheduler_type: str | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "The schedule of the learning rate; by default the recipe's: constant in paper."},
    )
    warmup_steps: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "Steps in which the learning rate rises to its peak, or their share below 1; by default the "
            "recipe's: 0 in paper."
        },
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Whether to remove columns that the model's forward does not name."}
    )

    logging_nan_inf_filter: bool = field(
        # For it, the host waits for the device in every step.
        default=False,
        metadata={
            "help": "Whether losses that are NaN or infinite are left out of the logged mean, at a step's cost."
        },
    )
    ddp_broadcast_buffers: bool | None = field(
        # An evaluation begins with it, and what is saved are the first process's own.
        default=False,
        metadata={"help": "Whether DDP sends the first process's buffers to the others in every step."},
    )

    def __post_init__(self) -> None:
        # With DeepSpeed, Trainer refuses the precision that a launcher asked for where the arguments do not name it.
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        unnamed = launched in ("bf16", "fp16") and not (self.bf16 or self.fp16)
        if unnamed and parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            setattr(self, launched, True)
        self._follow_recipe()
        super().__post_init__()
        self.entame_config()
        if not self.head_lr_multiplier > 0:
            raise ValueError(f"head_lr_multiplier={self.head_lr_multiplier} must be positive; 1 is the paper.")
        self._check_head_lr()
        for name in ("head_warmup_steps", "energy_logging_steps"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be 0 or a number of steps.")

    def _follow_recipe(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"Recipe {self.recipe!r} is unknown: use one of {', '.join(RECIPES)}.")
        # These are about something else that was given.
        others = {"head_lr": self.head_lr_multiplier != 1, "lr_scheduler_kwargs": self.lr_scheduler_type is not None}
        for name, value in (RECIPES["paper"] | RECIPES[self.recipe]).items():
            given = getattr(self, name) is not None or others.get(name, False)
            if not given:
                setattr(self, name, copy(value))
                if name == "entame_method":
                    self.recipes_method = value

    def _check_head_lr(self) -> None:
        if self.head_lr is None:
            return
        if self.head_lr_multiplier != 1:
            raise ValueError(
                f"head_lr={self.head_lr} and head_lr_multiplier={self.head_lr_multiplier} are both about the heads' "
                "learning rate: give one of them. head_lr is the rate itself, head_lr_multiplier its ratio to "
                "learning_rate."
            )
        if self.head_lr == AUTO:
            if self.learning_rate == 0:
                raise ValueError(
                    'head_lr="auto" shares the schedule of learning_rate, which is 0. To train the heads alone, pass '
                    "freeze_backbone=True and a positive learning_rate."
                )
            return
        with suppress(TypeError, ValueError):
            self.head_lr = float(self.head_lr)
        if not (isinstance(self.head_lr, float) and 0 < self.head_lr < math.inf):
            raise ValueError(
                f'head_lr={self.head_lr!r} must be "auto", which measures it in the first step, or a positive number, '
                "such as 1e-3."
            )
