"""A Gradio demo of a fine-tuned model, ready for a Space."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from ..files import write_text

_APP = """\
import gradio
from PIL import Image
from transformers import pipeline

classify = pipeline("image-classification", model="{model}")


def predict(image):
    # As in training, which laid transparent images over white.
    image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return {{found["label"]: found["score"] for found in classify(image)}}


gradio.Interface(predict, gradio.Image(type="pil", image_mode="RGBA"), gradio.Label(), title="{title}").launch()
"""

# What a Space installs beside Gradio.
_REQUIREMENTS = "pillow\ntimm\ntorch\ntorchvision\ntransformers>=5\n"


def write_app(folder: Path, repository: str | None = None) -> None:
    """Write `app.py` and `requirements.txt` beside a model: the app loads it from the Hub or from its folder."""
    for file, text in _files(folder, repository).items():
        write_text(file, text)


def check_app(folder: Path, repository: str | None = None) -> None:
    """Refuse to write an app over files that say something else."""
    for file, text in _files(folder, repository).items():
        if file.exists() and file.read_bytes() != text.encode():
            raise InputError(f"`gradio` would replace {file}. Move it away, or leave `gradio` out.")


def _files(folder: Path, repository: str | None) -> dict[Path, str]:
    app = _APP.format(model=repository or ".", title=repository or "Image classification")
    return {folder / "app.py": app, folder / "requirements.txt": _REQUIREMENTS}
