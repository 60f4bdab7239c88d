"""ENTAME put into a model and taken out again."""

from .apply import apply_entame
from .fold import fold_entame
from .wrap import as_transformers

__all__ = ["apply_entame", "as_transformers", "fold_entame"]
