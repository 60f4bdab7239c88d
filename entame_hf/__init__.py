"""ENTAME for Hugging Face image classifiers: fine-tune without contaminating the features you came for."""

__version__ = "0.1.0"

from .config import EntameConfig
from .energy import ErrorEnergy, error_energy
from .energy.inspection import HeadReport, inspect_head
from .errors import InputError, RunError
from .fold import fold_entame
from .head_rate import head_learning_rate
from .heads import Head, find_heads
from .layers import ZNormConv2d, ZNormLinear
from .patch import apply_entame
from .trainer import EntameTrainer
from .training_args import EntameTrainingArguments
from .znorm import z_norm

__all__ = [
    "EntameConfig",
    "EntameTrainer",
    "EntameTrainingArguments",
    "ErrorEnergy",
    "Head",
    "HeadReport",
    "InputError",
    "RunError",
    "ZNormConv2d",
    "ZNormLinear",
    "apply_entame",
    "error_energy",
    "find_heads",
    "fold_entame",
    "head_learning_rate",
    "inspect_head",
    "z_norm",
]
