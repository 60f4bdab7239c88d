"""The processor that is saved with a model prepares images as they were evaluated."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import Subset
from transformers import AutoImageProcessor, ViTImageProcessor

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.data import build_datasets, decode_image, set_image_size, split_dataset
from entame_hf.patch import as_transformers
from entame_hf.patch.wrapping import timm_processor

pytestmark = pytest.mark.runs

NAMES = ["no", "yes"]


@pytest.fixture(scope="module")
def splits():
    generator = np.random.default_rng(0)
    images = [Image.fromarray(generator.integers(0, 200, (50, 40, 3), dtype=np.uint8)) for _ in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)})
    rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 6}, features=features)
    return split_dataset({"train": rows, "validation": rows})


def build(kind, tiny_vit):
    """A model of either library, and its own processor."""
    if kind == "timm":
        wrapper = as_transformers(timm.create_model("test_resnet", num_classes=2))
        return wrapper, timm_processor(wrapper)
    tiny_vit.classifier = torch.nn.Linear(32, 2)
    tiny_vit.config.id2label = dict(enumerate(NAMES))
    return tiny_vit, ViTImageProcessor(size={"height": 32, "width": 32})


def trainer_of(model, data, folder, **options):
    args = EntameTrainingArguments(str(folder), use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1)
    return EntameTrainer(model, args, train_dataset=data.train, eval_dataset=data.validation, **options)


CHANGES = {"size": lambda processor: set_image_size(processor, 48), "statistics": lambda processor: processor}


@pytest.mark.parametrize("given", [True, False], ids=["given", "not-given"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_images_are_prepared_as_in_the_evaluation(tmp_path, tiny_vit, splits, kind, change, given):
    model, processor = build(kind, tiny_vit)
    data = build_datasets(splits, CHANGES[change](processor), own_statistics=change == "statistics", image_cache_gb=0)
    trainer = trainer_of(model, data, tmp_path, processing_class=data.processor if given else None)
    ViTImageProcessor().save_pretrained(tmp_path)
    trainer.save_model()
    pixels = AutoImageProcessor.from_pretrained(tmp_path)(
        decode_image(splits.validation[0]["image"]), return_tensors="pt"
    )
    torch.testing.assert_close(pixels["pixel_values"][0], data.validation[0]["pixel_values"], rtol=0, atol=1e-5)
    if kind == "timm":
        stock = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(stock), is_training=False)
        expected = transform(decode_image(splits.validation[0]["image"]))
        torch.testing.assert_close(expected, data.validation[0]["pixel_values"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "subsets"])
def test_a_processor_that_prepares_otherwise_is_refused(tmp_path, tiny_vit, splits, nested):
    model, processor = build("transformers", tiny_vit)
    data = build_datasets(splits, processor, image_cache_gb=0)
    if nested:
        data = data._replace(validation={"a": Subset(data.validation, [0, 1]), "b": Subset(data.validation, [2])})
    other = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.4] * 3)
    with pytest.raises(InputError, match="`processing_class` prepares images otherwise"):
        trainer_of(model, data, tmp_path, processing_class=other)
    # Settings that change no pixel.
    same = ViTImageProcessor(size={"height": 32, "width": 32}, crop_size=7)
    assert trainer_of(model, data, tmp_path, processing_class=same).processing_class is same


def test_datasets_of_ones_own_say_nothing(tmp_path, tiny_vit, splits):
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True)
    assert EntameTrainer(tiny_vit, args, train_dataset=splits.train).processing_class is None
