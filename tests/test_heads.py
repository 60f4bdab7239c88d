import pytest
import timm
import torch
from conftest import TINY_VIT
from torch import nn
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    HGNetV2Config,
    HGNetV2ForImageClassification,
    PPLCNetConfig,
    PPLCNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from entame_hf import EntameConfig, InputError, apply_entame, find_heads


def test_finds_the_leaf(classifier):
    build, _, path = classifier
    model = build(10)
    (head,) = find_heads(model)
    assert head.path == path
    assert head.module is model.get_submodule(path)


def test_inner_layers_as_wide_as_the_classes_are_no_heads(classifier):
    build, _, path = classifier
    # 32 and 16 are widths inside of these models.
    for width in (16, 32):
        assert [head.path for head in find_heads(build(width))] == [path]


def test_paths_are_taken_at_their_word():
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "b": nn.Conv2d(3, 4, 1), "c": nn.Conv2d(3, 4, 3)})
    assert [head.path for head in find_heads(model, ["a", "b"])] == ["a", "b"]
    with pytest.raises(ValueError, match=r"'d' is nothing in ModuleDict.*Candidates: c, b, a"):
        find_heads(model, "d")
    with pytest.raises(ValueError, match="kernel is 1×1"):
        find_heads(model, "c")
    assert [head.path for head in find_heads(model, ["a", "a"])] == ["a"]
    with pytest.raises(ValueError, match="'0' is nothing"):
        find_heads(model, [0])


def test_no_path_is_no_head():
    with pytest.raises(ValueError, match="names no head"):
        apply_entame(nn.ModuleDict({"a": nn.Linear(3, 4)}), EntameConfig(head=[]))


def test_an_unknown_model_is_not_guessed():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 10))
    with pytest.raises(ValueError, match=r'No classifier head found in Sequential. Pass EntameConfig\(head="path"\)'):
        find_heads(model)
    apply_entame(model, EntameConfig(head="2"))
    assert model[2].weight.std() < 1e-5


def test_a_model_without_a_head_is_refused_with_the_remedy():
    with torch.device("meta"):
        model = timm.create_model("test_resnet", num_classes=0)
    with pytest.raises(ValueError, match="num_classes=10"):
        find_heads(model)


@pytest.mark.parametrize("number", [2, TINY_VIT["hidden_size"], TINY_VIT["intermediate_size"]])
def test_a_backbone_whose_inner_layers_are_as_wide_as_the_classes_is_refused(number):
    model = ViTForImageClassification(ViTConfig(num_labels=number, **TINY_VIT)).vit
    with pytest.raises(InputError, match="ViTModel is a backbone without a classifier head"):
        find_heads(model)


@pytest.mark.parametrize("labels", [16, 32, 48, 60, 64, 128, 256, 1024])
def test_layers_of_a_backbone_are_no_heads_where_classes_are_as_many(labels):
    config = HGNetV2Config(num_labels=labels)
    assert [head.path for head in find_heads(HGNetV2ForImageClassification(config))] == ["fc"]


@pytest.mark.parametrize("labels", [16, 64, 256, 1280])
def test_a_last_convolution_is_no_head(labels):
    (head,) = find_heads(PPLCNetForImageClassification(PPLCNetConfig(num_labels=labels)))
    assert head.path.startswith("head")


@pytest.mark.parametrize("labels", [32, 64])
def test_projections_as_wide_as_the_classes_are_no_heads(labels):
    vision = {"hidden_size": labels, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"image_size": 32, "patch_size": 16}
    config = CLIPConfig(vision_config=vision, num_labels=labels, projection_dim=labels)
    assert [head.path for head in find_heads(CLIPForImageClassification(config))] == ["classifier"]


def test_both_heads_of_a_distilled_model_are_found():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = DeiTForImageClassificationWithTeacher(DeiTConfig(**sizes, image_size=32, patch_size=16, num_labels=32))
    assert [head.path for head in find_heads(model)] == ["cls_classifier", "distillation_classifier"]


@pytest.mark.parametrize("width", [7, 12])
def test_a_head_of_two_layers_as_wide_as_the_classes_has_to_be_named(width):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=16, num_labels=7))
    model.classifier = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 7))
    if width == 7:
        with pytest.raises(InputError, match=r"classifier.0 and classifier.2 have one output .*head=\"classifier.2\""):
            find_heads(model)
        assert [head.path for head in find_heads(model, "classifier.2")] == ["classifier.2"]
    else:
        assert [head.path for head in find_heads(model)] == ["classifier.2"]
