"""Decode common JPEGs fast: by libjpeg-turbo in threads, or by nvJPEG in batches."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from simplejpeg import decode_jpeg
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers.utils import logging

from .images import decode_image, encoded_bytes, read_orientation

logger = logging.get_logger(__name__)
_START, _END = b"\xff\xd8", b"\xff\xd9"
_BASELINE, _EXTENDED, _PROGRESSIVE, _SCAN, _APP1, _ADOBE = 0xC0, 0xC1, 0xC2, 0xDA, 0xE1, 0xEE


class JpegHeader(NamedTuple):
    """Describe a JPEG as it is stored, and whether it is shown so by its EXIF and XMP as Pillow reads them."""

    height: int
    width: int
    upright: bool


def common_jpeg(data: bytes) -> JpegHeader | None:
    """Read the header of a complete 8-bit grey or YCbCr JPEG; `None` for other files, on which decoders differ."""
    if not data.startswith(_START) or not data[-64:].rstrip(b"\0").endswith(_END):
        return None
    size, tagged, position = (0, 0), False, 2
    while position + 20 < len(data) and data[position] == 0xFF:
        kind, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4])
        body = data[position + 4 : position + 20]
        if kind == _SCAN:
            small = 0 < size[0] * size[1] <= (Image.MAX_IMAGE_PIXELS or float("inf"))
            return JpegHeader(*size, not tagged or _upright(data)) if small else None
        if kind in (_BASELINE, _EXTENDED, _PROGRESSIVE):
            size = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
            if body[0] != 8 or body[5] not in (1, 3) or body[6] == ord("R"):
                return None
        # EXIF or XMP.
        tagged = tagged or kind == _APP1
        # Transform 0: the channels are not YCbCr.
        if kind == _ADOBE and body.startswith(b"Adobe") and body[11] == 0:
            return None
        position += 2 + length
    return None


def decode_pixels(value: Any, least: tuple[int, int] | None = None) -> Tensor:
    """Decode an image to the pixels that [`decode_image`] gives, uint8 (3, H, W), faster for a common, upright JPEG.

    libjpeg-turbo decodes these without Pillow's copies and without Python's lock. A JPEG of twice, four or eight
    times the height and width that suffice (`least`) is decoded at that fraction, in less time and to slightly other
    pixels.
    """
    data = encoded_bytes(value)
    header = common_jpeg(data) if data else None
    if data and header and header.upright:
        size = (-1, -1) if least is None else _reduced(header, least)
        try:
            pixels = decode_jpeg(data, "RGB", min_height=size[0], min_width=size[1])
            return torch.from_numpy(pixels).permute(2, 0, 1)
        # Pillow decides what can be read, and has the better message.
        except ValueError:
            pass
    return pil_to_tensor(decode_image(value if data is None else data))


def _reduced(header: JpegHeader, least: tuple[int, int]) -> tuple[int, int]:
    for factor in (8, 4, 2):
        height, width = -(-header.height // factor), -(-header.width // factor)
        if height >= least[0] and width >= least[1]:
            return height, width
    return -1, -1


def decode_on_gpu(images: list[NDArray[np.uint8]], device: torch.device) -> list[Tensor] | None:
    """Decode upright [`common_jpeg`]s with TorchCodec's nvJPEG; `None` without it, or if one cannot be decoded.

    It does not interpolate colours between pixels as libjpeg-turbo does: good to train on, not to compare with.
    """
    decode = gpu_decoder()
    try:
        return None if decode is None else list(decode([*map(torch.from_numpy, images)], device=device))
    except RuntimeError:
        return None


def gpu_decoder() -> Callable[..., Any] | None:
    """Return TorchCodec's `decode_jpeg`; `None`, after a warning, where it is not installed."""
    try:
        from torchcodec import decoders
    # Its library does not load beside a torch of another kind.
    except (ImportError, OSError, RuntimeError):
        logger.warning_once(
            "Fewer than 8 processes decode JPEGs. With 9 cores or more, raise `dataloader_num_workers`; with fewer, "
            "let the GPU decode: pip install torchcodec"
        )
        return None
    return decoders.decode_jpeg


def _upright(data: bytes) -> bool:
    try:
        with Image.open(BytesIO(data)) as image:
            return read_orientation(image) not in range(2, 9)
    # Pillow decides how it is shown.
    except Exception:
        return False
