"""Read and decode images of any kind to RGB, within bounds of file size and pixels."""

from __future__ import annotations

import os
import stat
import zlib
from importlib import import_module
from io import BytesIO
from typing import Any, NamedTuple

import fsspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

MAX_FILE_BYTES = 2**28
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_PNG = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")

# How a file begins that git left to Git LFS.
LFS_POINTER = b"version https://git-lfs"


class UnreadableImageError(OSError):
    """Report an image that cannot be used: missing, broken, too large, or not an image."""


class DecodedImage(NamedTuple):
    """Hold an image's prepared pixels, uint8 (B,), channels last, its width over height, and its file's hash or 0."""

    pixels: NDArray[np.uint8]
    ratio: float
    content: int


class EncodedImage(NamedTuple):
    """Hold the file of an image that a GPU can decode, uint8 (B,), and its height and width."""

    file: NDArray[np.uint8]
    height: int
    width: int


def decode_image(value: Any) -> Image.Image:
    """Decode an image to upright 8-bit RGB, fully loaded.

    The EXIF orientation is applied, transparency is laid over white, 16-bit grey is scaled, and an animation gives
    its first frame. Floating-point grey is taken as 0 to 1 if no value is above 1, else as 0 to 255; 32-bit integers
    as 0 to 255. The format is recognised by content, never by the file's name. Metadata that cannot be parsed is
    ignored. HEIF needs `pip install pillow-heif`, JPEG XL `pip install pillow-jxl-plugin`.

    Args:
        value (`dict`, `str`, `os.PathLike`, `bytes` or `PIL.Image.Image`): The image as `datasets.Image(decode=False)`
            gives it (`{"bytes": ..., "path": ...}`), its path or URL, its encoded bytes, or the image itself.

    Raises:
        UnreadableImageError: If it is not a regular file of at most 256 MB, has more than `PIL.Image.MAX_IMAGE_PIXELS`
            pixels, cannot be decoded, or has values outside of its range.
    """
    data = encoded_bytes(value)
    # Broken files make Pillow's decoders raise nearly anything: SyntaxError, struct.error, IndexError...
    try:
        if data is None:
            return _to_rgb(value)
        try:
            return _decode(data)
        except UnreadableImageError:
            raise
        except Exception:
            # Pillow refuses a PNG for its metadata, of which the pixels need none.
            if not data.startswith(_PNG):
                raise
            return _decode(_without_metadata(data))
    except UnreadableImageError:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImageError(_unknown_format(data or b"")) from error
    except Exception as error:
        raise UnreadableImageError(f"{type(error).__name__}: {error}") from error


def encoded_bytes(value: Any) -> bytes | None:
    """Read an image's file; `None` for a `PIL.Image.Image`.

    Raises:
        UnreadableImageError: If it is missing, not a regular file or larger than 256 MB.
    """
    if isinstance(value, Image.Image):
        return None
    if isinstance(value, dict):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    try:
        if isinstance(value, str | os.PathLike):
            value = _read(os.fspath(value))
    except UnreadableImageError:
        raise
    # Remote file systems raise errors of their own.
    except Exception as error:
        raise UnreadableImageError(f"{type(error).__name__}: {error}") from error
    if isinstance(value, memoryview):
        value = value.tobytes()
    if not isinstance(value, bytes):
        raise UnreadableImageError(f"no image but {type(value).__name__}")
    if len(value) > MAX_FILE_BYTES:
        raise UnreadableImageError(f"the file is larger than {MAX_FILE_BYTES:,} bytes")
    return value


def is_converted(value: Any) -> bool:
    """Tell whether [`decode_image`] reads an image otherwise than Pillow's `convert("RGB")`, which others use.

    Such images are transparent, or have values of more than 8 bits.
    """
    try:
        data = encoded_bytes(value)
        image = value if data is None else Image.open(BytesIO(data))
        return bool(image.has_transparency_data or image.mode.startswith(("I", "F")))
    # Unreadable ones are named elsewhere.
    except Exception:
        return False


def read_orientation(image: Image.Image) -> int:
    """Read the EXIF orientation of an image, 1 if it has none that can be parsed."""
    try:
        return image.getexif().get(0x0112, 1)
    # Pillow's parsers raise nearly anything.
    except Exception:
        return 1


def check_pixel_count(width: int, height: int) -> None:
    """Refuse an image of more than `PIL.Image.MAX_IMAGE_PIXELS` pixels, before they are decoded."""
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        raise UnreadableImageError(f"{width} × {height} pixels are more than PIL.Image.MAX_IMAGE_PIXELS = {limit:,}")


def _read(path: str) -> bytes:
    # As `datasets` names files on the Hub and in archives.
    if "://" in path:
        with fsspec.open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    # Before opening: a pipe would be waited for, and a device may never end.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UnreadableImageError("not a regular file")
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise UnreadableImageError(f"the file is larger than {MAX_FILE_BYTES:,} bytes")
        # Python allocates as many bytes as are asked for.
        return file.read(size)


def _decode(data: bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(data))
    except UnidentifiedImageError:
        plugin = _plugin(data)
        if plugin is None:
            raise
        try:
            # Registers itself with Pillow.
            import_module(plugin[1])
        except ImportError:
            raise UnreadableImageError(f"a {plugin[0]} image, which needs: pip install {plugin[2]}") from None
        image = Image.open(BytesIO(data))
    with image:
        return _to_rgb(image)


def _plugin(data: bytes) -> tuple[str, str, str] | None:
    """Recognise a format that Pillow reads with a plugin: its name, the plugin's module and its package."""
    if data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS:
        return "HEIF", "pillow_heif.HeifImagePlugin", "pillow-heif"
    if data.startswith((b"\xff\x0a", b"\0\0\0\x0cJXL ")):
        return "JPEG XL", "pillow_jxl", "pillow-jxl-plugin"
    return None


def _unknown_format(data: bytes) -> str:
    if not data:
        return "the file is empty"
    if data.startswith(LFS_POINTER):
        return "a Git LFS pointer instead of the image: run git lfs pull"
    return "not an image, or of an unknown format"


def _without_metadata(png: bytes) -> bytes:
    kept, position = [_PNG], len(_PNG)
    while position + 12 <= len(png):
        end = position + 12 + int.from_bytes(png[position : position + 4])
        kind, intact = png[position + 4 : position + 8], png[end - 4 : end]
        orientation = kind == b"eXIf" and zlib.crc32(png[position + 4 : end - 4]).to_bytes(4) == intact
        if kind in _PIXEL_CHUNKS or orientation:
            kept.append(png[position:end])
        position = end
    return b"".join(kept)


def _to_rgb(image: Image.Image) -> Image.Image:
    check_pixel_count(*image.size)
    # Whether the type of values does not say which of them is white: floats, and a TIFF's 32-bit integers.
    bits = getattr(image, "tag_v2", {}).get(TiffImagePlugin.BITSPERSAMPLE)
    unscaled = image.mode == "F" or (image.mode == "I" and bits == (32,))
    image.load()
    method = _TRANSPOSE.get(read_orientation(image))
    # Pillow converts these to RGB by clipping at 255: all white, or all black.
    if unscaled or image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        grey = _scaled(values) if unscaled else np.divide(values.clip(0, 65535), 257, dtype=np.float32)
        rgb = Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
    elif image.has_transparency_data:
        rgba = image.convert("RGBA")
        rgb = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    else:
        rgb = image.convert("RGB")
    return rgb if method is None else rgb.transpose(method)


def _scaled(values: NDArray[Any]) -> NDArray[Any]:
    low, high = values.min(), values.max()
    # Not so either if a value is NaN.
    if not (low >= 0 and high <= 255):
        raise UnreadableImageError(f"its values run from {low:g} to {high:g}, and not within 0 to 1 or 0 to 255")
    return values * 255 if high <= 1 and values.dtype.kind == "f" else values
