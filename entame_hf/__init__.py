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

_MODULES = {
    "EntameConfig": "config",
    "EntameTrainer": "trainer",
    "EntameTrainingArguments": "training_args",
    "ErrorEnergy": "energy",
    "Head": "heads",
    "HeadFit": "patch",
    "HeadReport": "energy",
    "InputError": "errors",
    "NonFiniteError": "errors",
    "RunError": "errors",
    "ZNormConv2d": "layers",
    "ZNormLinear": "layers",
    "apply_entame": "patch",
    "error_energy": "energy",
    "find_heads": "heads",
    "fit_head": "patch",
    "fold_entame": "patch",
    "head_learning_rate": "trainer",
    "inspect_head": "energy",
    "z_norm": "layers",
}


# Each name is imported when it is first used: `entame --help` must not wait for torch and transformers.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
