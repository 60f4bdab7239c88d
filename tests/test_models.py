import pytest
import timm
import torch
from transformers import TimmWrapperForImageClassification

from entame_hf.models import as_transformers


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


def test_another_image_size_is_recorded():
    wrapper = as_transformers(timm.create_model("test_vit", num_classes=7, img_size=32))
    assert wrapper.config.model_args == {"img_size": [32, 32]}


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
