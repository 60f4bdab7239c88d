"""What to do to a classifier head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any, Literal, get_args

from .errors import InputError, unknown_value

Init = Literal["mei", "he_fan_out", "ridge", "keep"]

Method = Literal["base", "base_wu", "mei", "fn", "entame", "informed", "keep"]


@dataclass(frozen=True)
class EntameConfig:
    """Configure how the heads of a pretrained classifier start, and whether their features are normalised.

    Args:
        init (`"mei"`, `"he_fan_out"`, `"ridge"` or `"keep"`, *optional*, defaults to `"mei"`):
            The distribution the weights are drawn from; biases are set to zero. `"mei"` is the maximum-entropy
            initialisation N(0, φ_w), `"he_fan_out"` is N(0, 2/C), the paper's baseline, and `"keep"` leaves the
            head as it is. `"ridge"` draws as `"mei"` does, until [`EntameTrainer`] or [`fit_head`] fits the head to
            the training images' features.
        feature_norm (`bool`, *optional*, defaults to `True`):
            Whether the head's input is z-normalised across the batch.
        phi_w (`float`, *optional*, defaults to 1e-12):
            φ_w, the variance of each weight under `"mei"`. Not used when `noise_lambda` is given.
        noise_lambda (`float`, *optional*):
            λ. When given, φ_w = (γλ/C)², with γ the peak learning rate and C the number of classes.
        momentum (`float`, *optional*, defaults to 1.0):
            Weight of a full batch in the average of the feature statistics for evaluation, in (0, 1]; 1 replaces them
            (the paper). The average is corrected for its start. Lower it for small batches.
        eps (`float`, *optional*, defaults to 1e-5):
            Added to the variance under the root.
        sync (`bool`, *optional*, defaults to `True`):
            Whether features are normalised over the global batch. `False` normalises over each process's batch, and
            saves the main process's statistics.
        head (`str` or sequence of `str`, *optional*):
            Dotted path, or paths, of the classifier leaves, for models where the search must not guess.

    Raises:
        InputError: a field is outside of its domain; the message names what is allowed.

    Example:

    ```python
    >>> from entame_hf import EntameConfig

    >>> EntameConfig.for_method("base")
    EntameConfig(init='he_fan_out', feature_norm=False, phi_w=1e-12, noise_lambda=None, ...)
    ```

    Source: section 5 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """

    init: Init = "mei"
    feature_norm: bool = True
    phi_w: float = 1e-12
    noise_lambda: float | None = None
    momentum: float = 1.0
    eps: float = 1e-5
    sync: bool = True
    head: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.head is not None and not isinstance(self.head, str):
            # JSON has only lists, and a frozen value must be hashable.
            object.__setattr__(self, "head", tuple(self.head))
        if self.init not in get_args(Init):
            raise InputError(unknown_value("`init`:", self.init, get_args(Init)))
        for name in ("feature_norm", "sync"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}={getattr(self, name)!r}` must be True or False.")
        for name in ("phi_w", "noise_lambda", "eps", "momentum"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value > 0):
                raise InputError(f"`{name}={value}` must be a positive number, for example `{name}={_EXAMPLE[name]}`.")
        if self.momentum > 1:
            raise InputError(f"`momentum={self.momentum}` must be in (0, 1]: `momentum=1` is the paper's.")

    def under(self, prefix: str) -> EntameConfig:
        """Build the same configuration for a model that holds this one's under `prefix`."""
        paths = [self.head] if isinstance(self.head, str) else self.head
        return replace(self, head=paths and [f"{prefix}{path}" for path in paths])

    @classmethod
    def for_method(cls, method: Method, **changes: Any) -> EntameConfig:
        """Build the configuration of one of the paper's methods.

        Args:
            method (`str`):
                `"base"` (He fan-out head), `"base_wu"` (the same head; the warm-up step is the trainer's),
                `"mei"`, `"fn"` (He fan-out head over normalised features), `"entame"` (MEI and FN), `"informed"`
                (a small ridge head over normalised features) or `"keep"` (the head as transformers or timm
                initialised it).
            changes (*optional*):
                Other fields of the configuration, for example `phi_w=1e-10`.

        Returns:
            [`EntameConfig`]

        Raises:
            InputError: the method is unknown.
        """
        if method not in _METHODS:
            raise InputError(unknown_value("`entame_method`:", method, _METHODS))
        init, feature_norm = _METHODS[method]
        return replace(cls(init=init, feature_norm=feature_norm), **changes)

    @property
    def method(self) -> str:
        """The name of the method that this is one of; `"keep"` and `"informed"` may be over raw features."""
        norms = (True, False) if self.init in ("keep", "ridge") else (self.feature_norm,)
        return next(name for name, (init, norm) in _METHODS.items() if init == self.init and norm in norms)

    def weight_variance(self, num_classes: int, learning_rate: float | None = None) -> float:
        """Compute φ_w for a head of `num_classes` classes.

        Args:
            num_classes (`int`): C.
            learning_rate (`float`, *optional*): γ, the peak learning rate; needed with `noise_lambda` only.

        Returns:
            `float`: `phi_w`, or (γλ/C)² where `noise_lambda` is given (equation 20).

        Raises:
            InputError: `noise_lambda` is given without a learning rate.
        """
        if self.noise_lambda is None:
            return self.phi_w
        if not learning_rate:
            raise InputError("`noise_lambda` needs the peak learning rate: apply_entame(..., learning_rate=1e-4).")
        return (learning_rate * self.noise_lambda / num_classes) ** 2

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EntameConfig:
        """Build a configuration from `to_dict`'s result; keys that it does not know are an error."""
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise InputError(f"EntameConfig has no field {', '.join(sorted(unknown))}.")
        return cls(**values)


_EXAMPLE = {"phi_w": "1e-12", "noise_lambda": "1.0", "eps": "1e-5", "momentum": "0.1"}

_METHODS: dict[str, tuple[Init, bool]] = {
    "base": ("he_fan_out", False),
    "base_wu": ("he_fan_out", False),
    "mei": ("mei", False),
    "fn": ("he_fan_out", True),
    "entame": ("mei", True),
    "informed": ("ridge", True),
    "keep": ("keep", False),
}


def noise_to_signal_ratio(config: EntameConfig, classes: int, learning_rate: float, batch_size: int) -> float:
    """Compute Nλ², with λ = C·√φ_w/γ: the ratio of noise to signal in a head after one step of plain gradient descent.

    Noise is the energy of the drawn weights, signal the energy of the update. At 1 and above the noise is larger. N is
    `batch_size`, the examples in the global batch, and γ the peak learning rate.

    Source: section 5 of [ENTAME](https://arxiv.org/abs/1905.10698).
    """
    return batch_size * config.weight_variance(classes, learning_rate) * (classes / learning_rate) ** 2


def first_step_bound(config: EntameConfig, classes: int, learning_rate: float, batch_size: int) -> float:
    """Compute φ_w + γ²(C − 1)²/(NC²): up to where one step of plain gradient descent takes the mean square of a
    maximum-entropy head's weights, over normalised features of examples that are not correlated.

    Adam's first step moves each weight by about γ instead, and the mean square by about γ².

    Source: section 5 of [ENTAME](https://arxiv.org/abs/1905.10698), its bound of a row's energy divided by K.
    """
    update = (learning_rate * (classes - 1) / classes) ** 2 / batch_size
    return config.weight_variance(classes, learning_rate) + update
