"""The fast way to decode gives what the careful one gives, and leaves to it what it can't be trusted with."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from test_data_images import PIXELS, UNREADABLE
from torchvision.transforms.v2.functional import pil_to_tensor

from entame_hf.data import UnreadableImageError, decode_image, decode_pixels
from entame_hf.data.jpeg import common_jpeg


def jpeg(mode: str = "RGB", orientation: int | None = None, **options) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((61, 43), Image.Resampling.BICUBIC).convert(mode)
    if orientation:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    buffer = BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


JPEGS = {
    "rgb": jpeg(),
    "grey": jpeg("L"),
    "cmyk": jpeg("CMYK"),
    "progressive": jpeg(progressive=True),
    "full_chroma": jpeg(subsampling=0),
    "kept_rgb": jpeg(keep_rgb=True),
    "comment": jpeg(comment=b"\xff\xd9 in a comment"),
    "zeros_after": jpeg() + b"\0" * 20,
    **{f"orientation_{n}": jpeg(orientation=n) for n in range(1, 9)},
}
UNCOMMON = {"cmyk", "kept_rgb"}


@pytest.mark.parametrize("name", JPEGS)
def test_pixels_are_pillows(name):
    expected = pil_to_tensor(decode_image(JPEGS[name]))
    assert torch.equal(decode_pixels(JPEGS[name]), expected)


@pytest.mark.parametrize("name", JPEGS)
def test_headers_say_what_is_common(name):
    header = common_jpeg(JPEGS[name])
    assert (header is None) == (name in UNCOMMON)
    if header:
        assert (header.height, header.width) == (43, 61)
        assert header.upright == (not name.startswith("orientation") or name == "orientation_1")


@pytest.mark.parametrize("data", [data for data, *_ in PIXELS.values()], ids=PIXELS)
def test_other_kinds_are_decoded_with_care(data):
    assert common_jpeg(data) is None
    assert torch.equal(decode_pixels(data), pil_to_tensor(decode_image(data)))


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_images_raise_one_error(value):
    with pytest.raises(UnreadableImageError):
        decode_pixels(value)


def test_any_cut_is_noticed():
    whole = jpeg()
    for length in range(0, len(whole) - 2, 7):
        assert common_jpeg(whole[:length]) is None


def test_a_bomb_is_left_to_pillow(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    assert common_jpeg(jpeg()) is None
    with pytest.raises(UnreadableImageError, match="DecompressionBombError"):
        decode_pixels(jpeg())
