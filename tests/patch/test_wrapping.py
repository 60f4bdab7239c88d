from copy import deepcopy

import pytest
import timm
import torch
from transformers import AutoModelForImageClassification, TimmWrapperForImageClassification

from entame_hf.patch import as_transformers


def test_the_wrapper_holds_the_model_itself():
    model = timm.create_model("test_resnet", num_classes=7)
    wrapper = as_transformers(model)
    assert isinstance(wrapper, TimmWrapperForImageClassification)
    assert wrapper.timm_model is model
    assert wrapper.config.num_labels == wrapper.num_labels == 7
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(wrapper.eval()(images).logits, model.eval()(images), rtol=0, atol=0)


def test_wrapping_draws_no_random_number():
    model = timm.create_model("test_resnet", num_classes=7)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    as_transformers(model)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "size", "recorded"),
    [
        ("test_vit", 32, [32, 32]),
        ("mixer_s32_224", 64, [64, 64]),
        pytest.param(
            "efficientvit_m0",
            128,
            128,
            marks=pytest.mark.skipif(timm.__version__ == "1.0.30", reason="its layers know no image size there"),
        ),
    ],
)
def test_another_image_size_is_recorded(tmp_path, name, size, recorded):
    wrapper = as_transformers(timm.create_model(name, num_classes=7, img_size=size))
    assert wrapper.config.model_args == {"img_size": recorded}
    wrapper.save_pretrained(tmp_path)
    # A copy: weights that are read from a file begin anywhere in memory, where some CPUs add up in another order.
    loaded = deepcopy(AutoModelForImageClassification.from_pretrained(tmp_path))
    images = torch.randn(2, 3, size, size)
    assert torch.equal(loaded.eval()(images).logits, wrapper.eval()(images).logits)


def test_other_models_pass_through(tiny_vit):
    assert as_transformers(tiny_vit) is tiny_vit
    layer = torch.nn.Linear(2, 2)
    assert as_transformers(layer) is layer


def test_a_model_that_no_checkpoint_could_rebuild_is_refused():
    with pytest.raises(ValueError, match="model_args"):
        as_transformers(timm.create_model("test_resnet", num_classes=7, in_chans=1))


def test_names_of_classes_that_timm_knows_are_kept():
    model = timm.create_model("test_vit", num_classes=3)
    model.pretrained_cfg["label_names"] = ["ant", "bee", "cat"]
    assert as_transformers(model).config.label2id == {"ant": 0, "bee": 1, "cat": 2}
    model.reset_classifier(2)
    assert as_transformers(model).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
