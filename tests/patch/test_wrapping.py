from copy import deepcopy

import pytest
import timm
import torch
from transformers import AutoModelForImageClassification, TimmWrapperForImageClassification

from entame_hf import InputError, apply_entame
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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("test_resnet", {"in_chans": 1}),
        ("test_resnet", {"global_pool": "max"}),
        ("test_resnet", {"act_layer": "silu"}),
        ("test_resnet", {"output_stride": 8}),
        ("test_vit", {"act_layer": "quick_gelu", "img_size": 32}),
        ("test_convnext", {"conv_mlp": False, "norm_eps": 0.1}),
    ],
    ids=str,
)
@pytest.mark.parametrize("finish", [lambda model: model, apply_entame], ids=["stock", "normalising"])
def test_a_model_that_no_checkpoint_could_rebuild_is_refused(name, arguments, finish):
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"other logits.*model_args"):
        as_transformers(finish(timm.create_model(name, num_classes=7, **arguments)))


def test_a_model_whose_layers_were_exchanged_is_refused():
    model = timm.create_model("test_resnet", num_classes=7)
    model.act1 = torch.nn.SiLU()
    with pytest.raises(InputError, match="differs from timm"):
        as_transformers(model)
    model = timm.create_model("test_resnet", num_classes=7)
    model.fc = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(model.num_features, 7))
    with pytest.raises(InputError, match=r"differs from timm.*reset_classifier"):
        as_transformers(model)
    model.reset_classifier(7)
    assert as_transformers(model).timm_model is model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_training_alone_uses_makes_no_difference(dtype):
    model = timm.create_model("test_vit", num_classes=7, drop_rate=0.5, drop_path_rate=0.5).to(dtype)
    modes = [module.training for module in model.eval().patch_embed.train().modules()]
    wrapper = as_transformers(model)
    assert wrapper.timm_model is model
    assert [module.training for module in model.patch_embed.modules()] == modes
    assert not model.head.training


def test_a_model_without_values_is_wrapped_unseen():
    with torch.device("meta"):
        model = timm.create_model("test_resnet", num_classes=7)
    assert as_transformers(model).timm_model is model


def test_a_model_that_takes_other_inputs_is_wrapped_unseen():
    model = timm.create_model("test_resnet", num_classes=7)
    model.register_forward_pre_hook(lambda module, images: images[0].flatten(1))
    assert as_transformers(model).timm_model is model


def test_names_of_classes_that_timm_knows_are_kept():
    model = timm.create_model("test_vit", num_classes=3)
    model.pretrained_cfg["label_names"] = ["ant", "bee", "cat"]
    assert as_transformers(model).config.label2id == {"ant": 0, "bee": 1, "cat": 2}
    model.reset_classifier(2)
    assert as_transformers(model).config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
