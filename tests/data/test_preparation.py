"""What is kept of an image is what its processor makes of it, and batches are finished as it does."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from test_transforms import PROCESSORS
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import MobileViTImageProcessor, PPLCNetImageProcessor, ViTImageProcessor

from entame_hf.data import Preparation, decode_pixels, evaluation_transform, set_image_size
from entame_hf.data.resampling import crop_and_resize

ALL = {**PROCESSORS, "mobilevit": MobileViTImageProcessor(), "pplcnet": PPLCNetImageProcessor()}
each_processor = pytest.mark.parametrize("processor", ALL.values(), ids=ALL)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((300, 180), Image.Resampling.BICUBIC)


@each_processor
def test_pixels_scaled_and_shifted_are_the_processors(processor, image):
    preparation = Preparation(processor)
    pixels = preparation(image)
    assert preparation.dtype == pixels.dtype == torch.uint8
    given = pixels * preparation.scale + preparation.shift
    torch.testing.assert_close(given, evaluation_transform(processor)(image), atol=1e-5, rtol=0)


@each_processor
def test_the_faster_way_differs_by_less_than_one_level(processor, image):
    exact, fast = Preparation(processor), Preparation(processor, exact=False)
    assert fast.takes_tensors
    difference = (fast(pil_to_tensor(image)).int() - exact(image).int()).abs().float()
    assert difference.mean() < 0.1
    assert difference.max() <= 2


@each_processor
def test_resize_crop_gives_what_the_processor_gives(processor, image):
    preparation = Preparation(processor, exact=False)
    resize_crop = preparation.resize_crop
    if resize_crop is None:
        assert type(processor).__name__ in ("DeiTImageProcessor", "MobileViTImageProcessor", "PPLCNetImageProcessor")
        return
    for each in (image, image.rotate(90, expand=True), image.resize((64, 63))):
        pixels = pil_to_tensor(each)
        padded = torch.full((1, 3, 320, 330), 255, dtype=torch.uint8)
        padded[0, :, : each.height, : each.width] = pixels
        box, size = torch.tensor([resize_crop.box(*pixels.shape[1:])]), torch.tensor([pixels.shape[1:]])
        given = crop_and_resize(padded, box, resize_crop.size, resize_crop.filter, size)[0].round().clamp(0, 255)
        assert (given - preparation(pixels)).abs().mean() < 0.5


def test_whole_images_are_resized_to_a_square(image):
    preparation = Preparation(ViTImageProcessor(), exact=False, whole=True)
    given = preparation(pil_to_tensor(image))
    expected = pil_to_tensor(image.resize((336, 336), Image.Resampling.BICUBIC))
    assert preparation.output_size == (224, 224)
    assert (given.int() - expected.int()).abs().float().mean() < 0.1


def test_a_key_tells_pixels_apart_and_not_values():
    processor = set_image_size(ViTImageProcessor(), 32)
    other_values = type(processor).from_dict({**processor.to_dict(), "image_mean": [0.1] * 3})
    other_pixels = type(processor).from_dict({**processor.to_dict(), "resample": 0})
    key = Preparation(processor).key
    assert Preparation(other_values).key == key
    assert Preparation(other_pixels).key != key
    assert Preparation(set_image_size(processor, 33)).key != key


class Vignette(ViTImageProcessor):
    """Darkens the border: nothing that scaling and shifting could do."""

    def preprocess(self, images, **kwargs):
        batch = super().preprocess(images, **kwargs)
        values = batch["pixel_values"]
        batch["pixel_values"] = torch.where(torch.arange(values.shape[-1]) < 3, values.float() * 0.5, values.float())
        return batch


def test_what_cannot_be_split_is_done_whole(image):
    processor = Vignette()
    preparation = Preparation(processor, exact=False)
    assert preparation.dtype == torch.float32
    assert torch.equal(
        preparation(image) * preparation.scale + preparation.shift,
        processor(image, return_tensors="pt")["pixel_values"][0],
    )
    with pytest.raises(ValueError, match="augmentation=flip"):
        Preparation(processor, whole=True)


@pytest.mark.parametrize("whole", [False, True])
def test_large_jpegs_are_decoded_at_reduced_scale_for_training_alone(image, whole):
    buffer = BytesIO()
    image.resize((1600, 1200)).save(buffer, "JPEG", quality=95)
    for size, factor in ((224, 2), (64, 8), (700, 1)):
        processor = set_image_size(ViTImageProcessor(), size)
        preparation = Preparation(processor, exact=False, whole=whole)
        pixels = decode_pixels(buffer.getvalue(), preparation.least_size)
        assert pixels.shape[1:] == (1200 // factor, 1600 // factor)
        difference = (preparation(pixels).int() - preparation(decode_pixels(buffer.getvalue())).int()).abs()
        assert difference.float().mean() < 2
        assert Preparation(processor).least_size is None


def test_a_processor_that_gives_other_shapes_reads_all_pixels():
    assert Preparation(Vignette(), exact=False).least_size is None
