"""Image processors are run as they are, and set to other sizes and statistics."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from transformers import (
    BitImageProcessor,
    ConvNextImageProcessor,
    DeiTImageProcessor,
    EfficientNetImageProcessor,
    MobileViTImageProcessor,
    PoolFormerImageProcessor,
    PPLCNetImageProcessor,
    TextNetImageProcessor,
    TimmWrapperImageProcessor,
    ViTImageProcessor,
    ViTImageProcessorPil,
)

from entame_hf.data import evaluation_transform, output_size, set_image_size, set_normalization, update_pretrained_cfg
from entame_hf.errors import InputError


def timm_processor(name: str = "resnet18.a1_in1k") -> TimmWrapperImageProcessor:
    return TimmWrapperImageProcessor(timm.get_pretrained_cfg(name).to_dict(), architecture=name.split(".")[0])


PROCESSORS = {
    "timm": timm_processor(),
    "timm_squash": timm_processor("vit_base_patch16_siglip_224.v2_webli"),
    "vit": ViTImageProcessor(),
    "vit_pil": ViTImageProcessorPil(),
    "convnext": ConvNextImageProcessor(size={"shortest_edge": 224}),
    "convnext_384": ConvNextImageProcessor(),
    "bit": BitImageProcessor(),
    "deit": DeiTImageProcessor(),
    "efficientnet": EfficientNetImageProcessor(),
    "poolformer": PoolFormerImageProcessor(),
}
each_processor = pytest.mark.parametrize("processor", PROCESSORS.values(), ids=PROCESSORS)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    # Smooth, so that resizing it another way gives nearly the same, and nowhere symmetric.
    y, x = np.mgrid[0:90, 0:140] / 140
    return Image.fromarray((255 * np.stack([x, y, x * y], axis=-1)).astype(np.uint8))


@each_processor
@pytest.mark.parametrize("size", [None, 40], ids=["own_size", "set_size"])
def test_evaluation_is_exactly_the_processor(processor, size, image):
    processor = processor if size is None else set_image_size(processor, size)
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    given = evaluation_transform(processor)(image)
    assert torch.equal(given, expected)
    assert given.shape == (3, *output_size(processor))
    assert given.dtype == torch.float32


@each_processor
def test_a_size_is_set_on_a_copy(processor):
    before = output_size(processor)
    resized = set_image_size(processor, 48)
    assert type(resized) is type(processor)
    assert output_size(resized) == (48, 48)
    assert output_size(processor) == before


# The others keep the aspect ratio whatever they are told.
@pytest.mark.parametrize("name", ["timm", "timm_squash", "vit", "vit_pil", "bit", "deit", "efficientnet"])
def test_a_size_that_is_set_cuts_nothing_off(name):
    wide = Image.new("RGB", (200, 50), "white")
    wide.paste((0, 0, 0), (0, 0, 20, 50))
    wide.paste((0, 0, 0), (180, 0, 200, 50))
    given = evaluation_transform(set_image_size(PROCESSORS[name], 40))(wide)
    edges, middle = given[:, :, [0, -1]], given[:, :, 18:22]
    assert edges.max() < middle.min()


@pytest.mark.parametrize("processor", [ConvNextImageProcessor(), PPLCNetImageProcessor(), TextNetImageProcessor()])
def test_a_size_that_is_set_cuts_nothing_off_a_square(processor):
    framed = Image.new("RGB", (80, 80), "white")
    framed.paste((0, 0, 0), (4, 4, 76, 76))
    given = evaluation_transform(set_image_size(processor, 40))(framed)
    frame = torch.cat([given[:, [0, -1]].flatten(), given[:, :, [0, -1]].flatten()])
    assert frame.min() > given[:, 20, 20].max()


@pytest.mark.parametrize("size", [0, -8])
def test_a_size_must_be_positive(size):
    with pytest.raises(InputError, match=f"`image_size={size}`"):
        set_image_size(ViTImageProcessor(), size)


def test_images_of_no_common_size_are_refused():
    with pytest.raises(InputError, match=r"TextNetImageProcessor .* `image_size="):
        output_size(TextNetImageProcessor())


@each_processor
def test_normalization_is_set_on_a_copy(processor, image):
    mean, std = [0.1, 0.2, 0.3], [0.5, 0.25, 2.0]
    own = evaluation_transform(processor)(image)
    given = evaluation_transform(set_normalization(processor, mean, std))(image)
    plain = evaluation_transform(set_normalization(processor, [0.0] * 3, [1.0] * 3))(image)
    assert 0 <= plain.min() < 0.1
    assert 0.6 < plain.max() <= 1
    expected = (plain - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=0)
    assert torch.equal(evaluation_transform(processor)(image), own)


@pytest.mark.parametrize("processor", [MobileViTImageProcessor(), PPLCNetImageProcessor()])
def test_processors_that_ignore_a_normalization_are_named(processor):
    with pytest.raises(InputError, match=f"{type(processor).__name__}.*`normalization`"):
        set_normalization(processor, [0.1, 0.2, 0.3], [0.5, 0.6, 0.7])


def test_a_deviation_must_be_positive():
    with pytest.raises(InputError, match="positive"):
        set_normalization(ViTImageProcessor(), [0.0] * 3, [1.0, 0.0, 1.0])


@pytest.mark.parametrize("name", ["timm", "vit", "convnext", "efficientnet"])
def test_settings_survive_saving(name, image, tmp_path):
    processor = set_image_size(PROCESSORS[name], 56)
    processor = set_normalization(processor, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    if isinstance(processor, TimmWrapperImageProcessor):
        cfg = timm.get_pretrained_cfg("resnet18.a1_in1k").to_dict()
        before = dict(cfg)
        loaded = TimmWrapperImageProcessor(update_pretrained_cfg(cfg, processor))
        assert cfg == before
    else:
        processor.save_pretrained(tmp_path)
        loaded = type(processor).from_pretrained(tmp_path)
    assert torch.equal(evaluation_transform(loaded)(image), evaluation_transform(processor)(image))


def test_timms_test_size_goes_with_the_old_size():
    cfg = timm.get_pretrained_cfg("resnet18.a1_in1k").to_dict()
    assert cfg["test_input_size"] == (3, 288, 288)
    same = set_normalization(timm_processor(), [0.1] * 3, [0.2] * 3)
    assert update_pretrained_cfg(cfg, same)["test_input_size"] == (3, 288, 288)
    resized = update_pretrained_cfg(cfg, set_image_size(timm_processor(), 64))
    assert not {"test_input_size", "test_crop_pct"} & resized.keys()
    assert (resized["classifier"], resized["input_size"]) == ("fc", (3, 64, 64))


@pytest.mark.parametrize("size", [0, -1, 8193, 100_000])
def test_an_image_size_out_of_bounds_is_refused_before_an_image_is_made(size):
    with pytest.raises(InputError, match="must be from 1 to 8,192 pixels"):
        set_image_size(ViTImageProcessor(), size)
