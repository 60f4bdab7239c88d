"""What a reader sees of images: pixels, predictions and labels."""

import numpy as np
import pytest
from PIL import Image

from entame_hf.plots import batch_figure, save_figures, save_image, wrong_images_figure

IMAGES = np.random.default_rng(0).normal(size=(3, 3, 8, 8)).astype(np.float32)


def captions(figure):
    return [axes.get_title() for axes in figure.axes if axes.images]


def test_every_image_is_drawn_over_its_label():
    figure = batch_figure(IMAGES, np.array([1, 0, -100]), ["cat", "dog"])
    assert captions(figure) == ["dog", "cat", "no label"]
    drawn = figure.axes[0].images[0].get_array()
    expected = np.moveaxis((IMAGES[0] - IMAGES[0].min()) / np.ptp(IMAGES[0]), 0, -1)
    np.testing.assert_allclose(drawn, expected, atol=1e-6)


def test_mixed_labels_are_told_with_their_weights():
    labels = np.array([[0.3, 0.7, 0.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    assert captions(batch_figure(IMAGES, labels, ["a", "b", "c"])) == ["b 70%\na 30%", "a", "b 50%\nc 50%"]


def test_wrong_images_tell_prediction_confidence_and_label():
    figure = wrong_images_figure(IMAGES, [0, 1, 1], [1, 0, 2], [0.999, 0.8, 0.5], ["cat", "dog", "x" * 40])
    assert captions(figure) == [
        "cat (100%)\nlabel: dog",
        "dog (80%)\nlabel: cat",
        f"dog (50%)\nlabel: {'x' * 8}…{'x' * 7}",
    ]


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (8, 8, 3), (8, 8, 1), (3, 40, 2)], ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16"])
def test_images_of_every_layout_and_scale(tmp_path, shape, dtype):
    image = np.full(shape, 200, dtype=dtype)
    image[0, 0, 0] = 3
    figure = batch_figure([image, np.zeros_like(image)], np.array([0, 0]), ["a"])
    assert save_figures({"batch": figure}, tmp_path) == ["batch.png"]
    save_image(image, tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as saved:
        assert sorted(saved.size) == sorted(size for size in shape if size not in (1, 3))[-2:]
        assert np.asarray(saved).max() == 255


def test_a_large_batch_is_cut_and_names_of_any_script_are_drawn(tmp_path, recwarn):
    images, names = np.zeros((100, 3, 4, 4)), ["猫", "$x_{", "a\nb", "חתול", "\x1b\udcff"]
    figure = batch_figure(images, np.arange(100) % 5, names)
    assert len(captions(figure)) == 30
    assert save_figures({"batch": figure}, tmp_path) == ["batch.png"]
    assert [str(warning.message) for warning in recwarn] == []
