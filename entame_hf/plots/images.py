"""Pictures of images with a line of text under each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ..files import write_file
from .fonts import shorten, writable

Images = Sequence[np.ndarray] | np.ndarray

# Rows and columns of a picture hold so many images at most.
MOST_IMAGES, COLUMNS = 30, 6

LONGEST_NAME = 16


def batch_figure(images: Images, labels: np.ndarray, class_names: Sequence[str]) -> Figure | None:
    """Draw a training batch as the model sees it, with its labels.

    Args:
        images (`numpy.ndarray` of shape `(N, C, H, W)` or `(N, H, W, C)`):
            One or three channels, on any scale: each image is stretched to the range of the display.
        labels (`numpy.ndarray` of shape `(N,)` or `(N, K)`):
            Class indices, negative ones for images without a label, or one row of probabilities an image (mixup).
        class_names (sequence of `str`): K names, in any script.

    Returns:
        `matplotlib.figure.Figure` or `None`: the first 30 images; None for an empty batch.

    Example:

    ```python
    >>> import numpy as np
    >>> from entame_hf.plots import batch_figure

    >>> figure = batch_figure(np.random.rand(4, 3, 32, 32), np.array([0, 1, 1, 0]), ["cat", "dog"])
    >>> figure.savefig("batch.png")  # doctest: +SKIP
    ```
    """
    families, names = writable([shorten(name, LONGEST_NAME) for name in class_names])

    def caption(label: np.ndarray) -> str:
        if label.ndim == 0:
            return names[int(label)] if label >= 0 else "no label"
        best = [int(index) for index in np.argsort(-label, kind="stable")[:2] if label[index] > 0.005]
        return "\n".join(f"{names[index]} {label[index]:.0%}" if len(best) > 1 else names[index] for index in best)

    return _grid(
        images, [caption(label) for label in np.asarray(labels)[:MOST_IMAGES]], families, "Augmented training images"
    )


def wrong_images_figure(
    images: Images,
    predicted: Sequence[int] | np.ndarray,
    true: Sequence[int] | np.ndarray,
    confidence: Sequence[float] | np.ndarray,
    class_names: Sequence[str],
) -> Figure | None:
    """Draw images that a model got wrong, each under its prediction with the probability and its label.

    The first 30 of N: class indices in `predicted` and `true`, and the probability of the predicted class, see
    [`confident_errors`]. None where there is no image.
    """
    families, names = writable([shorten(name, LONGEST_NAME) for name in class_names])
    captions = [
        f"{names[guess]} ({share:.0%})\nlabel: {names[label]}"
        for guess, label, share in zip(predicted, true, confidence, strict=True)
    ]
    return _grid(images, captions[:MOST_IMAGES], families, "Most confident errors: prediction and label")


def _grid(images: Images, captions: list[str], families: list[str], title: str) -> Figure | None:
    if not captions:
        return None
    columns = min(len(captions), COLUMNS)
    rows = -(-len(captions) // columns)
    # A card shows it at half the size: captions must still be read.
    figure = Figure(figsize=(max(1.7 * columns, 3), 2.15 * rows + 0.4), dpi=150, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.axis("off")
    for axes, image, caption in zip(panels, images, captions, strict=False):
        axes.imshow(_displayable(image), cmap="gray", vmin=0, vmax=1)
        axes.set_title(caption, fontsize=9, family=families, parse_math=False)
    return figure


def save_image(image: np.ndarray, file: str | Path) -> None:
    """Write an image as the model reads it, see [`batch_figure`], to a PNG file."""
    picture = Image.fromarray((_displayable(image) * 255).round().astype(np.uint8))
    write_file(Path(file), lambda draft: picture.save(draft, "PNG"))


def _displayable(image: np.ndarray) -> np.ndarray:
    """Stretch an image to [0, 1], channels last; normalised pixels have no scale of their own."""
    pixels = np.asarray(image, dtype=np.float32)
    if pixels.shape[0] in (1, 3):
        pixels = np.moveaxis(pixels, 0, -1)
    low, high = np.nanmin(pixels), np.nanmax(pixels)
    pixels = np.nan_to_num((pixels - low) / max(float(high - low), 1e-12))
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
