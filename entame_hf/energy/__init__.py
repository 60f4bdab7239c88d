"""How noisy the error is that a classifier sends back: measured, recorded in training, and inspected before."""

from .error import ErrorEnergy, error_energy

__all__ = ["ErrorEnergy", "error_energy"]
