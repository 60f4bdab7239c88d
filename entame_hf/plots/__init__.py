"""Pictures of runs at the size of a README: what trainings did, and what a model confuses."""

from .confusion import confusion_matrix_figure
from .curves import (
    Series,
    accuracy_curves,
    error_energy_figure,
    feature_variance_curves,
    learning_curves,
    noise_energy,
    save_figures,
    series,
)
from .images import batch_figure, save_image, wrong_images_figure

__all__ = [
    "Series",
    "accuracy_curves",
    "batch_figure",
    "confusion_matrix_figure",
    "error_energy_figure",
    "feature_variance_curves",
    "learning_curves",
    "noise_energy",
    "save_figures",
    "save_image",
    "series",
    "wrong_images_figure",
]
