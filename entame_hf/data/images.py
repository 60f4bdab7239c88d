"""Decode an image of any kind to RGB."""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import pil_to_tensor

from .jpeg import common_jpeg


class UnreadableImageError(OSError):
    """Say that an image could not be decoded: broken, truncated, missing or no image at all."""


def decode_image(value: Any) -> Image.Image:
    """Decode an image to 8-bit RGB, upright and fully loaded.

    The EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled, and the first
    frame of an animation is taken. Floating grey runs to 1 where no value is above, else to 255; 32-bit integers
    run to 255. Pillow's limits on huge images hold.

    Args:
        value (`dict`, `str`, `os.PathLike`, `bytes` or `PIL.Image.Image`):
            The image as `datasets.Image(decode=False)` gives it (`{"bytes": ..., "path": ...}`), its path,
            its encoded bytes, or the image itself.

    Returns:
        `PIL.Image.Image`: The image, in mode "RGB".

    Raises:
        UnreadableImageError: If it can't be decoded, or has values that are no grey.

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
            return _to_rgb(ImageOps.exif_transpose(value), _is_deep(value))
        if not isinstance(value, str | os.PathLike | bytes):
            raise TypeError(f"no image but {type(value).__name__}")
        with Image.open(BytesIO(value) if isinstance(value, bytes) else value) as image:
            ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image, _is_deep(image))
    except (MemoryError, UnreadableImageError):
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


def _is_deep(image: Image.Image) -> bool:
    """Tell whether values don't say by their type which of them is white: floats, and a TIFF's 32-bit integers."""
    bits = getattr(image, "tag_v2", {}).get(TiffImagePlugin.BITSPERSAMPLE)
    return image.mode == "F" or (image.mode == "I" and bits == (32,))


def _to_rgb(image: Image.Image, deep: bool) -> Image.Image:
    image.load()
    # Pillow converts these to RGB by clipping at 255: all white, or all black.
    if deep or image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        grey = _levels(values) if deep else values.clip(0, 65535) / 257
        return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _levels(values: NDArray[Any]) -> NDArray[Any]:
    low, high = values.min(), values.max()
    # No number is neither.
    if not (low >= 0 and high <= 255):
        raise UnreadableImageError(f"its values run from {low:g} to {high:g}, and not within 0 to 1 or 0 to 255")
    return values * 255 if high <= 1 and values.dtype.kind == "f" else values
