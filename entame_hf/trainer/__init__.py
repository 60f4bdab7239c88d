"""A `Trainer` that starts every head at maximum entropy."""

from .callbacks import EarlyEvaluation
from .energies import PREFIX as ENERGY_PREFIX
from .energies import EnergyRecorder
from .head_lr import LOGIT_STEP, HeadRates, head_learning_rate
from .parallel import same_on_all, whole_models
from .resume import check_checkpoint, last_whole_checkpoint
from .trainer import EntameTrainer

__all__ = [
    "ENERGY_PREFIX",
    "LOGIT_STEP",
    "EarlyEvaluation",
    "EnergyRecorder",
    "EntameTrainer",
    "HeadRates",
    "check_checkpoint",
    "head_learning_rate",
    "last_whole_checkpoint",
    "same_on_all",
    "whole_models",
]
