"""ENTAME for Hugging Face image classifiers: fine-tune without contaminating the features you came for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import EntameConfig
    from .energy import ErrorEnergy, HeadReport, error_energy, inspect_head
    from .errors import InputError, NonFiniteError, RunError
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
    "NonFiniteError",
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

# Those that import least come first.
_MODULES = ("errors", "config", "layers", "heads", "patch", "energy", "training_args", "trainer")


# Each name is imported when it is first used: `entame --help` must not wait for torch and transformers.
def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        if name in vars(found := import_module(f".{module}", __name__)):
            return vars(found)[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
