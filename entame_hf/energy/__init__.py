"""Measure how noisy the error is that a classifier sends back, in a step and before a training."""

from .error import ErrorEnergy, error_energy
from .inspection import HeadReport, inspect_head
from .step import StepEnergies, merge

__all__ = ["ErrorEnergy", "HeadReport", "StepEnergies", "error_energy", "inspect_head", "merge"]
