"""Pictures of runs at the size of a README: what trainings did, and what a model confuses."""

from .confusion import confusion_matrix_figure
from .curves import (
    History,
    accuracy_curves,
    error_energy_figure,
    feature_variance_curves,
    learning_curves,
    noise_energy,
    noise_energy_curves,
    save_figures,
    series,
)
from .drawing import COLOURS, DASHES, Series, Styles, draw_groups
from .images import batch_figure, save_image, wrong_images_figure

__all__ = [
    "COLOURS",
    "DASHES",
    "History",
    "Series",
    "Styles",
    "accuracy_curves",
    "batch_figure",
    "confusion_matrix_figure",
    "draw_groups",
    "error_energy_figure",
    "feature_variance_curves",
    "learning_curves",
    "noise_energy",
    "noise_energy_curves",
    "save_figures",
    "save_image",
    "series",
    "wrong_images_figure",
]
