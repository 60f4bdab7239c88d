"""How noisy the error is that a classifier sends back: measured, and inspected before a training."""

from .error import ErrorEnergy, error_energy
from .inspection import HeadReport, inspect_head

__all__ = ["ErrorEnergy", "HeadReport", "error_energy", "inspect_head"]
