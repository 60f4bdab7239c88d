"""The demo of a Space predicts what the command predicts."""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cli_folders import hf_folder, photos, timm_folder  # noqa: F401
from PIL import Image

from entame_hf import InputError
from entame_hf.cli.app import check_app, write_app
from entame_hf.cli.model import load_trained
from entame_hf.cli.predict import predict


class Gradio(SimpleNamespace):
    """What the app uses of Gradio, which converts images to `image_mode` and calls the function."""

    def __init__(self):
        super().__init__(Image=self.image, Label=lambda: None, Interface=self.interface)

    def image(self, type, image_mode="RGB"):
        self.mode = image_mode

    def interface(self, function, *args, **kwargs):
        self.predict = lambda file: function(Image.open(file).convert(self.mode))
        return SimpleNamespace(launch=lambda: None)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P"])
def test_transparent_images_are_laid_over_white(tmp_path, monkeypatch, hf_folder, mode):  # noqa: F811
    pixels = np.random.default_rng(0).integers(0, 255, (50, 40, 4), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(tmp_path / "image.png")
    write_app(tmp_path, str(hf_folder))
    gradio = Gradio()
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    runpy.run_path(str(tmp_path / "app.py"))
    found = gradio.predict(tmp_path / "image.png")
    model, processor = load_trained(str(hf_folder))
    probabilities, _ = predict(model, processor, [str(tmp_path / "image.png")])
    assert len(found) == 5
    for label, score in found.items():
        assert score == pytest.approx(probabilities[0, model.config.label2id[label]], abs=2e-6)


@pytest.mark.parametrize("name", ["app.py", "requirements.txt"])
def test_an_app_replaces_no_other_file(tmp_path, name):
    check_app(tmp_path)
    write_app(tmp_path)
    # Its own, once more.
    check_app(tmp_path)
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=rf"`gradio` would replace .*{name}. Move it away, or leave `gradio` out"):
        check_app(tmp_path)
