"""What a model card says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..metrics import Evaluation

# The other methods are its peers.
METHODS_OF_ENTAME = ("entame", "mei", "fn", "informed")


@dataclass(frozen=True)
class CardFacts:
    """Hold the facts of a model card, which leaves out what is None or empty."""

    name: str
    # The model's class, or timm's name for it.
    architecture: str
    class_names: list[str]
    # Of the weights beside the card.
    evaluation: Evaluation
    # The model's id on the Hub; None for the folder that holds the card.
    repository: str | None = None
    # "transformers", "timm" (both libraries load it), or None for neither.
    library_name: str | None = None
    has_processor: bool = False
    is_adapter: bool = False
    # The id on the Hub of the model that was fine-tuned, and the name of one without an id.
    base_model: str | None = None
    base_name: str | None = None
    # As in the metadata.
    license: Mapping[str, str] = field(default_factory=dict)
    inherits_license: bool = False
    # Ids on the Hub, and the name of a dataset without one.
    datasets: Sequence[str] = ()
    dataset_name: str = ""
    dataset_config: str | None = None
    language: str | None = None
    # Added to the tags that every card has.
    tags: Sequence[str] = ()
    task: str = "image-classification"
    # Rows of the training table, such as {"training images": 4000}.
    training: Mapping[str, Any] = field(default_factory=dict)
    # See [`describe_adaptation`].
    adaptation: Mapping[str, Any] | None = None
    # Nλ², see [`noise_to_signal_ratio`].
    noise: float | None = None
    # Noise in the first error, with this head and with `base`.
    noise_share: float | None = None
    base_noise_share: float | None = None
    # Accuracy of a linear probe that is expected on unseen images.
    probe_accuracy: float | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    # PNG files beside the card; and those that the Hub's widget shows, with their titles.
    pictures: Sequence[str] = ()
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def uses_entame(self) -> bool:
        """Whether the method is one of ENTAME's."""
        return self.adaptation is not None and self.adaptation["method"] in METHODS_OF_ENTAME
