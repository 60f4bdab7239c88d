"""Images of every kind decode to upright 8-bit RGB, or fail as unreadable."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from entame_hf.data import UnreadableImageError, decode_image, is_converted

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def half_and_half(left, right, mode: str = "RGB") -> Image.Image:
    image = Image.new(mode, (20, 10), right)
    image.paste(left, (0, 0, 10, 10))
    return image


def left_and_right(image: Image.Image) -> tuple:
    return image.getpixel((2, image.height // 2)), image.getpixel((image.width - 3, image.height // 2))


def palette_with_transparency() -> bytes:
    image = half_and_half(RED, BLUE).quantize(2)
    return encoded(image, transparency=image.getpixel((15, 5)))


def grey16(low: int, high: int) -> Image.Image:
    values = np.full((10, 20), high, dtype=np.uint16)
    values[:, :10] = low
    return Image.fromarray(values)


def deep(low: float, high: float, dtype: type, format: str = "TIFF") -> bytes:
    values = np.full((10, 20), high, dtype=dtype)
    values[:, :10] = low
    return encoded(Image.fromarray(values), format)


def animation(format: str) -> bytes:
    first, second = Image.new("RGB", (20, 10), RED), Image.new("RGB", (20, 10), BLUE)
    options = {"lossless": True} if format == "WEBP" else {}
    return encoded(first, format, save_all=True, append_images=[second], duration=100, **options)


PIXELS = {
    "rgb": (encoded(half_and_half(RED, BLUE)), RED, BLUE),
    "grey": (encoded(half_and_half(0, 200, "L")), (0,) * 3, (200,) * 3),
    "one_bit": (encoded(half_and_half(0, 1, "1")), (0,) * 3, WHITE),
    "grey16_png": (encoded(grey16(0x4040, 0xFFFF)), (0x40,) * 3, WHITE),
    "grey16_tiff": (encoded(grey16(0x0101, 0x8080), "TIFF"), (1,) * 3, (0x80,) * 3),
    "grey16_pgm": (encoded(grey16(0x4040, 0x8080), "PPM"), (0x40,) * 3, (0x80,) * 3),
    "float_to_1": (deep(0.25, 1.0, np.float32), (64,) * 3, WHITE),
    "float_to_255": (deep(0.25, 200.0, np.float32), (0,) * 3, (200,) * 3),
    "integers_of_32_bits": (deep(1, 200, np.int32), (1,) * 3, (200,) * 3),
    "rgba_over_white": (encoded(half_and_half((255, 0, 0, 255), (0, 0, 0, 0), "RGBA")), RED, WHITE),
    "half_transparent": (encoded(Image.new("RGBA", (20, 10), (0, 0, 0, 51))), (204,) * 3, (204,) * 3),
    "grey_with_alpha": (encoded(half_and_half((0, 255), (0, 0), "LA")), (0,) * 3, WHITE),
    "palette": (encoded(half_and_half(RED, BLUE).quantize(2)), RED, BLUE),
    "transparent_palette": (palette_with_transparency(), RED, WHITE),
    "transparent_colour": (encoded(half_and_half(RED, BLUE), transparency=BLUE), RED, WHITE),
    "animated_gif": (animation("GIF"), RED, RED),
    "animated_webp": (animation("WEBP"), RED, RED),
}


@pytest.mark.parametrize(("data", "left", "right"), PIXELS.values(), ids=PIXELS)
def test_colours_survive(data, left, right):
    image = decode_image(data)
    assert image.mode == "RGB"
    assert left_and_right(image) == (left, right)


@pytest.mark.parametrize("data", [value[0] for value in PIXELS.values()], ids=PIXELS)
def test_images_that_others_read_otherwise_are_known(data):
    image = Image.open(BytesIO(data))
    differs = (np.array(image.convert("RGB")) != np.array(decode_image(data))).any()
    # Deep values within 0 to 255 are as Pillow clips them.
    deep = image.mode in ("I", "F", "I;16")
    assert is_converted(data) == is_converted(image) == (differs or deep)
    assert not is_converted(b"no image")


def test_cmyk_jpeg_is_near_its_rgb():
    data = encoded(half_and_half(RED, WHITE).convert("CMYK"), "JPEG", quality=95)
    left, right = (np.array(pixel) for pixel in left_and_right(decode_image(data)))
    assert np.abs(left - RED).max() < 20
    assert np.abs(right - WHITE).max() < 20


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "left", "size"), [(1, RED, (20, 10)), (3, BLUE, (20, 10)), (6, None, (10, 20))]
)
def test_exif_orientation_is_applied(format, orientation, left, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decode_image(encoded(half_and_half(RED, BLUE), format, exif=exif))
    assert image.size == size
    pixel = image.getpixel((2, 5)) if left else image.getpixel((5, 2))
    assert np.abs(np.array(pixel) - (left or RED)).max() < 20


def test_sources_are_equivalent(tmp_path: Path):
    image = half_and_half(RED, BLUE)
    path = tmp_path / "a.png"
    image.save(path)
    data = path.read_bytes()
    values = [path, str(path), data, image, {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}]
    values += [{"bytes": data, "path": "no/such/file.png"}, {"path": str(path)}]
    assert {decode_image(value).tobytes() for value in values} == {image.tobytes()}


def test_an_image_that_is_given_is_left_alone():
    image = half_and_half((255, 0, 0, 255), (0, 0, 0, 0), "RGBA")
    image.getexif()[0x0112] = 6
    before = image.tobytes()
    assert decode_image(image).size == (10, 20)
    assert (image.tobytes(), image.size, image.getexif()[0x0112]) == (before, (20, 10), 6)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
UNREADABLE = {
    "zero_bytes": b"",
    "html": b"<!DOCTYPE html><html><body>404</body></html>",
    "truncated_jpeg": encoded(NOISE, "JPEG")[:-1500],
    "truncated_png": encoded(NOISE)[:-3000],
    "header_only": encoded(NOISE)[:40],
    "none": None,
    "neither_bytes_nor_path": {"bytes": None, "path": None},
    "float_beyond_255": deep(0, 256.0, np.float32),
    "float_below_0": deep(-0.5, 1.0, np.float32),
    "float_not_a_number": deep(0.5, float("nan"), np.float32),
    "integers_beyond_255": deep(0, 65535, np.int32),
    "missing_file": "no/such/file.jpg",
    "number": 3,
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_images_raise_one_error(value):
    with pytest.raises(UnreadableImageError):
        decode_image(value)


def test_values_that_are_no_grey_are_told():
    with pytest.raises(
        UnreadableImageError, match=r"^its values run from -0.5 to 1, and not within 0 to 1 or 0 to 255$"
    ):
        decode_image(UNREADABLE["float_below_0"])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_an_opened_image_is_its_file(dtype):
    data = deep(0, 1, dtype)
    assert decode_image(Image.open(BytesIO(data))).tobytes() == decode_image(data).tobytes()


def test_a_decompression_bomb_is_unreadable(monkeypatch):
    data = encoded(NOISE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UnreadableImageError, match="DecompressionBombError"):
        decode_image(data)
