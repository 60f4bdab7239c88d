"""The model card: what is known of a training and its model, beside the weights."""

from .card import is_hub_id, license_of, write_model_card
from .update import update_card

__all__ = ["is_hub_id", "license_of", "update_card", "write_model_card"]
