"""Tell which JPEGs the fast decoders can be trusted with, and decode many at once on a GPU."""

from __future__ import annotations

from io import BytesIO
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

_START, _END = b"\xff\xd8", b"\xff\xd9"

_BASELINE, _EXTENDED, _PROGRESSIVE, _SCAN, _APP1, _ADOBE = 0xC0, 0xC1, 0xC2, 0xDA, 0xE1, 0xEE

_ORIENTATION = 0x0112


class JpegHeader(NamedTuple):
    """Hold what the header of a JPEG says.

    Attributes:
        height, width (`int`): Of the image as it is stored.
        upright (`bool`): Whether it is shown as it is stored, by EXIF and XMP as Pillow reads them.
    """

    height: int
    width: int
    upright: bool


def common_jpeg(data: bytes) -> JpegHeader | None:
    """Read the header of a whole grey or YCbCr JPEG of 8 bits.

    Decoders agree on these. On others they don't: on those that were cut off, on CMYK, on RGB.

    Args:
        data (`bytes`): a file.

    Returns:
        [`JpegHeader`] or `None`: `None` for every other file, and for images beyond Pillow's limit.
    """
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
        # Transform 0: channels that are no YCbCr.
        if kind == _ADOBE and body.startswith(b"Adobe") and body[11] == 0:
            return None
        position += 2 + length
    return None


def decode_on_gpu(images: list[bytes], device: torch.device) -> list[Tensor] | None:
    """Decode upright [`common_jpeg`]s with nvJPEG, together.

    Its colours are not interpolated between pixels as libjpeg-turbo's are: good to train on, not to compare with.

    Args:
        images (`list[bytes]`): the files.
        device (`torch.device`): a CUDA device.

    Returns:
        `list[torch.Tensor]` or `None`: uint8 (3, H, W) each; `None` where one of them can't be decoded so.
    """
    encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in images]
    try:
        return decode_jpeg(encoded, mode=ImageReadMode.RGB, device=device)
    except RuntimeError:
        return None


def _upright(data: bytes) -> bool:
    try:
        with Image.open(BytesIO(data)) as image:
            # The rule of ImageOps.exif_transpose: any other value says nothing.
            return image.getexif().get(_ORIENTATION) not in range(2, 9)
    # Pillow's readers raise nearly anything.
    except Exception:
        return False
