"""A trainer that can say what it did."""

from __future__ import annotations

from typing import Any

from transformers import Trainer
from transformers.utils import logging

from .base_noise import BaseNoise
from .evaluation import Evaluations
from .parallel import share_buffers

logger = logging.get_logger(__name__)


class ReportingTrainer(Trainer):
    """A [`Trainer`] that remembers what its evaluations said of which weights, and writes that into the model card.

    Attributes:
        card_options (`dict`): arguments of `create_model_card` whenever it is called, also by `push_to_hub`, such as
            `{"dataset_tags": "uoft-cs/cifar10"}`.
    """

    model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.card_options: dict[str, Any] = {}
        self.evaluations = Evaluations()
        self.base_noise = BaseNoise(self)
        self.add_callback(self.evaluations)
        self.add_callback(self.base_noise)

    # The only place that sees an evaluation's predictions, whatever the metrics make of them. All processes evaluate
    # the model that the first one saves.
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        share_buffers(self.model)
        output = super().evaluation_loop(*args, **kwargs)
        if kwargs.get("metric_key_prefix") == "eval" and self.is_world_process_zero():
            self.evaluations.observe(output, self.state)
        return output

    # Trainer's card does not know what was done to the model, and draws nothing.
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            try:
                # Imported here: drawing takes long to import, and most processes never draw.
                from ..model_card import write_model_card

                write_model_card(self, *args, **{**self.card_options, **kwargs})
            # The model is saved, and no card is worth a training.
            except Exception as error:
                logger.warning(f"The model card was not written: {error} ({type(error).__name__}).")
