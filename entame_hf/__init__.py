"""ENTAME for Hugging Face image classifiers: fine-tune without contaminating the features you came for."""

from .config import EntameConfig
from .energy import ErrorEnergy, HeadReport, error_energy, inspect_head
from .errors import InputError, RunError
from .heads import Head, find_heads
from .layers import ZNormConv2d, ZNormLinear, z_norm
from .patch import HeadFit, apply_entame, fit_head, fold_entame
from .trainer import EntameTrainer, head_learning_rate
from .training_args import EntameTrainingArguments

__all__ = [
    "EntameConfig",
    "EntameTrainer",
    "EntameTrainingArguments",
    "ErrorEnergy",
    "Head",
    "HeadFit",
    "HeadReport",
    "InputError",
    "RunError",
    "ZNormConv2d",
    "ZNormLinear",
    "apply_entame",
    "error_energy",
    "find_heads",
    "fit_head",
    "fold_entame",
    "head_learning_rate",
    "inspect_head",
    "z_norm",
]
