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
    """Decode an image to the pixels that [`decode_image`] gives, faster where it is a common JPEG.

    Those go through libjpeg-turbo without Pillow's copies and without holding Python's lock, so that threads decode
    side by side. Everything else, a JPEG that the fast way refuses included, goes through [`decode_image`].

    Args:
        value: as for [`decode_image`].

    Returns:
        `torch.Tensor`: uint8 (3, H, W), RGB.

    Raises:
        UnreadableImageError: If it can't be decoded.
    """
    if isinstance(value, dict):
        value = value["path"] if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str | os.PathLike) and os.path.splitext(value)[1].lower() in (".jpg", ".jpeg"):
        try:
            with open(value, "rb") as file:
                value = file.read()
        except OSError as error:
            raise UnreadableImageError(f"{type(error).__name__}: {error}") from error
    if isinstance(value, bytes) and value.startswith(b"\xff\xd8\xff"):
        try:
            # The header alone is read, which says what is inside and holds huge images to Pillow's limits.
            with Image.open(BytesIO(value)) as image:
                common = image.format == "JPEG" and image.mode in ("L", "RGB")
            if common:
                data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
                return decode_jpeg(data, mode=ImageReadMode.RGB, apply_exif_orientation=True)
        except MemoryError:
            raise
        # Pillow has the last word on what can be read, and the better message.
        except Exception:
            pass
    return pil_to_tensor(decode_image(value))


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
