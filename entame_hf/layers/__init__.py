"""z-normalisation across a batch: `z_norm`, and the classifiers that use it."""

from .statistics import merge, moments, widen, z_norm
from .znorm import ZNorm, ZNormConv2d, ZNormLeaf, ZNormLinear, without_statistics

__all__ = [
    "ZNorm",
    "ZNormConv2d",
    "ZNormLeaf",
    "ZNormLinear",
    "merge",
    "moments",
    "widen",
    "without_statistics",
    "z_norm",
]
