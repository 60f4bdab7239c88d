"""Pictures of runs at the size of a README: what trainings did, and what a model confuses."""

from .confusion import confusion_matrix_figure
from .curves import (
    History,
    accuracy_curves,
    feature_variance_curves,
    learning_curves,
    noise_share_curves,
    save_figures,
    series,
)
from .drawing import Series, Styles

__all__ = [
    "History",
    "Series",
    "Styles",
    "accuracy_curves",
    "confusion_matrix_figure",
    "feature_variance_curves",
    "learning_curves",
    "noise_share_curves",
    "save_figures",
    "series",
]
