"""Decode an image of any kind to RGB."""

import os
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import pil_to_tensor

from .jpeg import common_jpeg


class UnreadableImageError(OSError):
    """Say that an image could not be decoded: broken, truncated, missing or no image at all."""


def decode_image(value: Any) -> Image.Image:
    """Decode an image to 8-bit RGB, upright and fully loaded.

    The EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled, and the first
    frame of an animation is taken. Pillow's limits on huge images hold.

    Args:
        value (`dict`, `str`, `os.PathLike`, `bytes` or `PIL.Image.Image`):
            The image as `datasets.Image(decode=False)` gives it (`{"bytes": ..., "path": ...}`), its path,
            its encoded bytes, or the image itself.

    Returns:
        `PIL.Image.Image`: The image, in mode "RGB".

    Raises:
        UnreadableImageError: If it can't be decoded.

    Example:

    ```python
    >>> decode_image("cat.png").mode
    'RGB'
    ```
    """
    if isinstance(value, dict):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    # Broken files make Pillow's decoders raise nearly anything: SyntaxError, struct.error, IndexError...
    try:
        if isinstance(value, Image.Image):
            return _to_rgb(ImageOps.exif_transpose(value))
        if not isinstance(value, str | os.PathLike | bytes):
            raise TypeError(f"no image but {type(value).__name__}")
        with Image.open(BytesIO(value) if isinstance(value, bytes) else value) as image:
            ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImageError("not an image, or of an unknown format") from error
    except Exception as error:
        raise UnreadableImageError(f"{type(error).__name__}: {error}") from error


def decode_pixels(value: Any) -> Tensor:
    """Decode an image to the pixels that [`decode_image`] gives, faster where it is a common JPEG, stored upright.

    Those go through libjpeg-turbo without Pillow's copies and without holding Python's lock, so that threads decode
    side by side. Everything else goes through [`decode_image`].

    Args:
        value: as for [`decode_image`].

    Returns:
        `torch.Tensor`: uint8 (3, H, W), RGB.

    Raises:
        UnreadableImageError: If it can't be decoded.
    """
    data = encoded_bytes(value)
    header = common_jpeg(data) if data else None
    if data and header and header.upright:
        try:
            encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            return decode_jpeg(encoded, mode=ImageReadMode.RGB)
        # Pillow has the last word on what can be read, and the better message.
        except RuntimeError:
            pass
    return pil_to_tensor(decode_image(value if data is None else data))


def encoded_bytes(value: Any) -> bytes | None:
    """Give an image's file as bytes.

    Args:
        value: as for [`decode_image`].

    Returns:
        `bytes` or `None`: `None` for what is no file, or none that can be read.
    """
    if isinstance(value, dict):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str | os.PathLike):
        try:
            with open(value, "rb") as file:
                return file.read()
        except OSError:
            return None
    return value if isinstance(value, bytes) else None


def _to_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow converts these to RGB by clipping at 255: all white.
        grey = np.asarray(image).clip(0, 65535) / 257
        return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
