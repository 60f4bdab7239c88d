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
    """Hold the facts of a model card. The card leaves out what is None or empty.

    Args:
        name (`str`): the model's name.
        architecture (`str`): the model's class, or timm's name for it.
        class_names (`list[str]`): C names by index, in any script.
        evaluation ([`Evaluation`]): of the weights beside the card.
        repository (`str`, *optional*): the model's id on the Hub; None for the folder that holds the card.
        library_name (`str`, *optional*): `"transformers"`, `"timm"` (both libraries load it), or None for neither.
        has_processor (`bool`): whether an image processor lies beside the model.
        is_adapter (`bool`): whether the folder holds a peft adapter.
        base_model (`str`, *optional*): the id on the Hub of the model that was fine-tuned.
        base_name (`str`, *optional*): the name of a base model without an id.
        license (`dict`): `license`, `license_name` and `license_link`, as in the metadata.
        inherits_license (`bool`): whether the license is the base model's.
        datasets (`list[str]`): ids on the Hub.
        dataset_name (`str`): the name of a dataset without an id.
        dataset_config (`str`, *optional*): the dataset's configuration.
        language (`str`, *optional*): goes to the metadata.
        tags (`list[str]`): added to the tags that every card has.
        task (`str`): the pipeline's tag.
        training (`dict`): rows of the training table, such as `{"training images": 4000}`.
        adaptation (`dict`, *optional*): see [`describe_adaptation`].
        noise (`float`, *optional*): Nλ², see [`noise_to_signal_ratio`].
        noise_share, base_noise_share (`float`, *optional*): noise in the first error, with this head and with `base`.
        probe_accuracy (`float`, *optional*): accuracy of a linear probe that is expected on unseen images, in [0, 1].
        hyperparameters (`dict`): names and values of the training arguments.
        pictures (list of `str`): names of the PNG files beside the card.
        examples (`dict`): images for the Hub's widget, titles by the name of the file beside the card.
    """

    name: str
    architecture: str
    class_names: list[str]
    evaluation: Evaluation
    repository: str | None = None
    library_name: str | None = None
    has_processor: bool = False
    is_adapter: bool = False
    base_model: str | None = None
    base_name: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    inherits_license: bool = False
    datasets: Sequence[str] = ()
    dataset_name: str = ""
    dataset_config: str | None = None
    language: str | None = None
    tags: Sequence[str] = ()
    task: str = "image-classification"
    training: Mapping[str, Any] = field(default_factory=dict)
    adaptation: Mapping[str, Any] | None = None
    noise: float | None = None
    noise_share: float | None = None
    base_noise_share: float | None = None
    probe_accuracy: float | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[str] = ()
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def uses_entame(self) -> bool:
        """Whether the method is one of ENTAME's."""
        return self.adaptation is not None and self.adaptation["method"] in METHODS_OF_ENTAME
