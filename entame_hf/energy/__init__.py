"""Measure the energy of the error that a classifier sends back: of logits, of a step, before a run."""

from .error import ErrorEnergy, error_energy
from .inspection import HeadReport, inspect_head
from .step import StepEnergies, energy_of_batch

__all__ = ["ErrorEnergy", "HeadReport", "StepEnergies", "energy_of_batch", "error_energy", "inspect_head"]
