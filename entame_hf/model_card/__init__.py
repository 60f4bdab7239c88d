"""The model card: facts, a Markdown template, and the update of a card that people edited."""

from .card import CardFacts, render_card, write_model_card
from .license import is_hub_id, license_of

__all__ = ["CardFacts", "is_hub_id", "license_of", "render_card", "write_model_card"]
