"""A `Trainer` that starts every head at maximum entropy."""

from .head_lr import head_learning_rate
from .trainer import EntameTrainer

__all__ = ["EntameTrainer", "head_learning_rate"]
