"""The fast way to decode gives what the careful one gives, and leaves to it what it can't be trusted with."""

import struct
import sys
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from test_images import PIXELS, UNREADABLE
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import ViTImageProcessor

from entame_hf.data import Preparation, UnreadableImageError, decode_image, decode_pixels, set_image_size
from entame_hf.data.jpeg import common_jpeg, decode_on_gpu
from entame_hf.data.pipeline import HostBatch, ImagePipeline
from entame_hf.data.workers import Workers


def jpeg(mode: str = "RGB", orientation: int | None = None, **options) -> bytes:
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((61, 43), Image.Resampling.BICUBIC).convert(mode)
    if orientation:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    buffer = BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def exif(orientation: int, order: str, kind: str) -> bytes:
    """Write EXIF with one entry by hand: Pillow writes neither big-endian nor long ones."""
    code = {"H": 3, "I": 4}[kind]
    value = struct.pack(order + kind, orientation).ljust(4, b"\0")
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + mark + struct.pack(order + "IHHHI", 8, 1, 0x0112, code, 1) + value + bytes(4)


def xmp(orientation: int) -> bytes:
    return b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>' % orientation


def late_app1(data: bytes) -> bytes:
    """Move the EXIF behind the frame's header."""
    start = data.index(b"\xff\xe1")
    end = start + 2 + int.from_bytes(data[start + 2 : start + 4])
    scan = data.index(b"\xff\xda", end)
    return data[:start] + data[end:scan] + data[start:end] + data[scan:]


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
    **{f"orientation_6{o}{kind}": jpeg(exif=exif(6, o, kind)) for o in "<>" for kind in "HI"},
    "orientation_late": late_app1(jpeg(orientation=6)),
    "orientation_xmp": jpeg(xmp=xmp(6)),
    "orientation_xmp_beside_exif": jpeg(xmp=xmp(8), exif=Image.Exif()),
    "upright_xmp": jpeg(xmp=xmp(1)),
    "exif_first": jpeg(xmp=xmp(6), exif=exif(1, "<", "H")),
    "out_of_range": jpeg(exif=exif(9, ">", "H")),
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


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(bytearray(data), np.uint8)


def test_a_batch_is_decoded_by_torchcodec():
    """On the CPU here: nvJPEG gives other colours at edges, through the same call."""
    pytest.importorskip("torchcodec.decoders")
    files = [JPEGS["rgb"], JPEGS["grey"], JPEGS["progressive"]]
    decoded = decode_on_gpu([*map(as_array, files)], torch.device("cpu"))
    assert all(torch.equal(a, pil_to_tensor(decode_image(b))) for a, b in zip(decoded, files, strict=True))
    broken = [*map(as_array, [JPEGS["rgb"], b"\xff\xd8 broken \xff\xd9"])]
    assert decode_on_gpu(broken, torch.device("cpu")) is None


def test_without_torchcodec_jpegs_are_decoded_on_the_cpu(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    assert [decode_on_gpu([as_array(JPEGS["rgb"])], torch.device("cpu")) for _ in range(2)] == [None, None]
    assert [record.getMessage() for record in caplog.records] == [
        "Fewer than 8 processes decode JPEGs. With 9 cores or more, raise `dataloader_num_workers`; with fewer, let "
        "the GPU decode: pip install torchcodec"
    ]


@pytest.mark.parametrize("orientation", [None, 6])
def test_a_reduced_scale_suffices(orientation):
    data = jpeg(orientation=orientation)
    for least, size in (((43, 61), (43, 61)), ((22, 31), (22, 31)), ((22, 32), (43, 61)), ((6, 8), (6, 8))):
        expected = size if orientation is None else (61, 43)
        assert decode_pixels(data, least).shape[1:] == expected


def test_what_a_gpu_decodes_joins_what_threads_decode():
    """The path of a GPU with the CPU in its place: positions of a batch are mixed, and some are left to threads."""
    pytest.importorskip("torchcodec.decoders")
    preparation = Preparation(set_image_size(ViTImageProcessor(), 32), exact=False)
    pipeline, cpu = ImagePipeline(preparation, None, 2), torch.device("cpu")
    png = BytesIO()
    Image.new("RGB", (30, 40), (200, 30, 60)).save(png, "PNG")
    values = [png.getvalue(), JPEGS["rgb"], JPEGS["orientation_6"], JPEGS["grey"], JPEGS["progressive"]]
    kept = {}
    for chosen, positions, there in (
        (values, np.array([4, 2, 0, 1, 3]), [1, 3, 4]),
        ([values[1], values[3], values[4]], np.array([2, 0, 1]), [0, 1, 2]),
    ):
        batch = HostBatch.allocate(np.arange(len(chosen)), pipeline.length, 0, cpu)
        files = {i: file for i, value in enumerate(chosen) if (file := pipeline.read_for_gpu(value))}
        unread = UnreadableImageError("odd")
        rest = pipeline.decode_on_gpu(batch, positions, {9: unread, **files}, cpu, kept.update)
        assert rest == {9: unread}
        done = sorted(files)
        left = np.delete(np.arange(len(chosen)), done)
        workers = Workers(lambda row, value: pipeline.decode(value), pipeline.length)
        rest = [chosen[i] for i in left]
        places = np.array(positions[left])
        assert workers.start_decoding(batch.pixels.numpy(), batch.ratios.numpy(), places, places, rest)() == []
        pixels = batch.pixels_on(cpu)
        for i, value in enumerate(chosen):
            expected = pipeline.decode(value)
            assert (pixels[positions[i]].int() - torch.from_numpy(expected.pixels).int()).abs().max() <= 2
            assert batch.ratios[positions[i]] == pytest.approx(expected.ratio)
            if i in done:
                assert kept[i].content == expected.content
                assert kept[i].ratio == pytest.approx(expected.ratio)
        assert sorted(done) == there
