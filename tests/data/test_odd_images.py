"""Odd images are used where their pixels can be read, and refused in bounded time and memory where they cannot."""

import json
import os
import socket
import struct
import subprocess
import sys
import time
import zlib
from io import BytesIO
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from entame_hf.data import UnreadableImageError, decode_image, decode_pixels

PIXELS = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
PICTURE = Image.fromarray(PIXELS)


def encoded(image: Image.Image = PICTURE, format: str = "PNG", **options) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def chunk(kind: bytes, content: bytes, damage: int = 0) -> bytes:
    checksum = zlib.crc32(kind + content) ^ damage
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def png(*chunks: bytes, at_end: bool = False) -> bytes:
    """Insert chunks after a PNG's header, or before its end."""
    data = encoded()
    place = len(data) - 12 if at_end else 33
    return data[:place] + b"".join(chunks) + data[place:]


def compressed_text(size: int) -> bytes:
    return chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"x" * size))


ORIENTATION = Image.Exif()
ORIENTATION[0x0112] = 6
TURNED = chunk(b"eXIf", ORIENTATION.tobytes()[6:])
LARGE = compressed_text(3_000_000)
INTERNATIONAL = chunk(b"iTXt", b"Comment\0\1\0\0\0" + zlib.compress(b"x" * 3_000_000))
PROFILE = chunk(b"iCCP", b"profile\0\0" + zlib.compress(b"x" * 3_000_000))
BROKEN_EXIF = b"Exif\0\0II*\0\x08\0\0\0\xff\xff broken"
METADATA = {
    "large_text": png(LARGE),
    "large_text_at_the_end": png(LARGE, at_end=True),
    "large_international_text": png(INTERNATIONAL),
    "large_profile": png(PROFILE),
    "plain_text_of_2_mb": png(chunk(b"tEXt", b"Comment\0" + b"x" * 2_000_000)),
    "much_text_in_all": png(*[compressed_text(1_000_000)] * 70),
    "text_that_cannot_be_unpacked": png(chunk(b"zTXt", b"Comment\0\0nothing")),
    "text_with_a_wrong_checksum": png(chunk(b"tEXt", b"Comment\0x", damage=1)),
    "png_exif": png(chunk(b"eXIf", BROKEN_EXIF)),
    "png_exif_with_a_wrong_checksum": png(chunk(b"eXIf", ORIENTATION.tobytes()[6:], damage=1)),
    "png_profile_exif": png(chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n 4\nzz"))),
    "webp_exif": encoded(format="WEBP", lossless=True, exif=BROKEN_EXIF),
    "webp_empty_exif": encoded(format="WEBP", lossless=True, exif=b"Exif\0\0"),
    "webp_xmp": encoded(format="WEBP", lossless=True, xmp=b"\xff\xfe<x:xmpmeta" + b"\0" * 2_000_000),
}


@pytest.mark.parametrize("data", METADATA.values(), ids=METADATA)
def test_images_with_strange_metadata_are_used(data):
    assert np.array_equal(np.asarray(decode_image(data)), PIXELS)
    assert np.array_equal(decode_pixels(data).permute(1, 2, 0), PIXELS)


@pytest.mark.parametrize("format", ["JPEG", "AVIF", "TIFF"])
def test_broken_exif_changes_no_pixel(format):
    plain, strange = encoded(format=format), encoded(format=format, exif=BROKEN_EXIF)
    assert torch.equal(decode_pixels(strange), decode_pixels(plain))


@pytest.mark.parametrize("others", [[LARGE], [LARGE, PROFILE]], ids=["text", "text_and_profile"])
def test_an_orientation_beside_large_metadata_is_applied(others):
    turned = np.asarray(PICTURE.transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal(np.asarray(decode_image(png(TURNED))), turned)
    assert np.array_equal(np.asarray(decode_image(png(*others, TURNED))), turned)


@pytest.mark.parametrize("damaged", [encoded()[:-500], png(LARGE)[:-500]], ids=["plain", "with_text"])
def test_a_damaged_png_is_not_used_without_its_metadata(damaged):
    with pytest.raises(UnreadableImageError):
        decode_image(damaged)


@pytest.mark.parametrize("name", ["photo", "photo.jpg_large", "photo.heic", "photo.txt", "photo.JPG.part"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "JPEG2000", "PCX", "TGA"])
def test_the_content_tells_the_format(tmp_path, name, format):
    path = tmp_path / name
    path.write_bytes(encoded(format=format))
    assert decode_image(path).size == decode_pixels({"bytes": None, "path": str(path)}).shape[:0:-1] == (40, 30)


def test_images_of_other_file_systems_are_read(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.writestr("a/1.png", encoded())
    fsspec.filesystem("memory").pipe("/photos/1.png", encoded())
    for path in (f"zip://a/1.png::{tmp_path}/photos.zip", "memory://photos/1.png", f"file://{tmp_path}/1.png"):
        (tmp_path / "1.png").write_bytes(encoded())
        assert np.array_equal(np.asarray(decode_image({"bytes": None, "path": path})), PIXELS)
    with pytest.raises(UnreadableImageError, match="FileNotFoundError"):
        decode_image("memory://photos/2.png")


CONTENT = {
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "a HEIF image, which needs: pip install pillow-heif"),
    "mif1": (b"\0\0\0\x1cftypmif1\0\0\0\0mif1heix" + bytes(99), "a HEIF image, which needs: pip install pillow-heif"),
    "jxl": (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99), "a JPEG XL image, which needs: pip install pillow-jxl-plugin"),
    "jxl_codestream": (b"\xff\n" + bytes(99), "a JPEG XL image, which needs: pip install pillow-jxl-plugin"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a Git LFS pointer .* run git lfs pull"),
    "empty": (b"", "the file is empty"),
    "text": (b"no image", "not an image, or of an unknown format"),
}


@pytest.mark.parametrize(("data", "reason"), CONTENT.values(), ids=CONTENT)
def test_the_reason_says_what_to_do(data, reason, monkeypatch):
    # As where they are not installed.
    monkeypatch.setitem(sys.modules, "pillow_heif.HeifImagePlugin", None)
    monkeypatch.setitem(sys.modules, "pillow_jxl", None)
    with pytest.raises(UnreadableImageError, match=reason):
        decode_image(data)


def test_an_installed_plugin_is_used(tmp_path, monkeypatch):
    (tmp_path / "pillow_jxl.py").write_text(
        "from PIL import Image, ImageFile\n"
        "def accept(prefix): return prefix.startswith(b'\\xff\\n')\n"
        "class Jxl(ImageFile.ImageFile):\n"
        "    format, format_description = 'JXL', 'JPEG XL'\n"
        "    def _open(self): self._size, self._mode = (3, 2), 'RGB'\n"
        "    def load(self): self.im = Image.new('RGB', (3, 2), (1, 2, 3)).im\n"
        "Image.register_open('JXL', Jxl, accept)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert decode_image(b"\xff\n" + bytes(99)).getpixel((0, 0)) == (1, 2, 3)
    finally:
        Image.ID.remove("JXL")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 * 10**9)


def bound_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


FILES = {
    "fifo": (fifo, "not a regular file"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "link_to_a_fifo": (lambda path: (os.mkfifo(f"{path}_"), path.symlink_to(f"{path}_")), "not a regular file"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "socket": (bound_socket, "not a regular file"),
    "of_3_gb": (sparse, "larger than 268,435,456 bytes"),
    "link_to_itself": (lambda path: path.symlink_to(path), "OSError"),
    "null_in_its_name": (None, "ValueError"),
}


@pytest.mark.parametrize(("make", "reason"), FILES.values(), ids=FILES)
def test_what_is_no_regular_file_is_refused_unread(make, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("odd.jpg")
    if make:
        make(path)
    begin = time.process_time()
    for decode in (decode_image, decode_pixels):
        with pytest.raises(UnreadableImageError, match=reason):
            decode({"bytes": None, "path": str(path) if make else "a\0b.jpg"})
    assert time.process_time() - begin < 0.5


def zeros(width: int, height: int, bits: int = 1) -> bytes:
    """Write a PNG of zeros without holding its pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0))
    packer, line = zlib.compressobj(9), bytes(1 + -(-width * bits // 8))
    data = b"".join(packer.compress(line) for _ in range(height)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(10_000, 9_000), (90_000_000, 1), (1, 90_000_000)], ids=str)
def test_more_pixels_than_pillow_decodes_are_refused_before_they_are(size):
    data = encoded(Image.new("1", (8, 8)))
    data = data[:16] + struct.pack(">II", *size) + data[24:]
    data = data[:29] + struct.pack(">I", zlib.crc32(data[12:29])) + data[33:]
    for decode in (decode_image, decode_pixels):
        with pytest.raises(
            UnreadableImageError, match=rf"{size[0]} × {size[1]} pixels are more than PIL.Image.MAX_IMAGE_PIXELS"
        ):
            decode(data)


def test_a_lack_of_memory_makes_an_image_unreadable(monkeypatch):
    def fail(*_args, **_kwargs):
        raise MemoryError

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", fail)
    with pytest.raises(UnreadableImageError, match="MemoryError"):
        decode_image(encoded())


THIN = [(20_000, 2), (2, 20_000), (100_000, 1), (1, 100_000), (1_000_000, 3), (65_000, 1), (1, 1)]

PROGRAM = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from test_preparation import ALL, Vignette
from entame_hf.data import Preparation
from entame_hf.data.pipeline import ImagePipeline

found = {}
kinds = [(name, processor, dict(exact=exact)) for name, processor in ALL.items() for exact in (True, False)]
kinds += [("canvas", ALL["vit"] if "vit" in ALL else next(iter(ALL.values())), dict(whole=True, exact=False))]
kinds += [("vignette", Vignette(), dict())]
for name, processor, options in kinds:
    pipeline = ImagePipeline(Preparation(processor, **options), None, 2)
    for path in sorted(Path(sys.argv[1]).iterdir()):
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        image = pipeline.decode(str(path))
        seconds = time.process_time() - begin
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert isinstance(image, tuple), (name, options, path.name, image)
        found[f"{name} {options} {path.name}"] = seconds, grown
print(json.dumps(found))
"""


@pytest.mark.runs
def test_long_images_are_prepared_in_bounded_time_and_memory(tmp_path):
    for width, height in THIN:
        (tmp_path / f"{width}x{height}.png").write_bytes(zeros(width, height, 8))
    encoded(Image.new("RGB", (1, 60_000)), "JPEG")
    (tmp_path / "1x60000.jpg").write_bytes(encoded(Image.new("RGB", (1, 60_000)), "JPEG"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    slow = {name: seconds for name, (seconds, _) in found.items() if seconds > 1}
    large = {name: grown for name, (_, grown) in found.items() if grown > 60}
    assert not slow
    assert not large
