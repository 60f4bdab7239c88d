"""A wrapped timm model that was folded saves files that timm and transformers both load."""

import copy
import json

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForImageClassification,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTForImageClassification,
)

from entame_hf import EntameConfig, InputError, apply_entame, fold_entame
from entame_hf.patch import as_transformers

IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 10


def wrapped():
    torch.manual_seed(0)
    return as_transformers(timm.create_model("test_resnet", num_classes=10))


def from_config():
    return TimmWrapperForImageClassification(TimmWrapperConfig(architecture="test_resnet", num_labels=10))


def loaded(folder):
    wrapped().save_pretrained(folder / "pretrained")
    return AutoModelForImageClassification.from_pretrained(folder / "pretrained")


SOURCES = {
    "wrapped": lambda folder: wrapped(),
    "config": lambda folder: from_config(),
    "loaded": loaded,
    "other-classes": lambda folder: AutoModelForImageClassification.from_pretrained(
        loaded(folder).config._name_or_path, num_labels=7, ignore_mismatched_sizes=True
    ),
}


def fold(model):
    return fold_entame(model)


def fold_then_copy(model):
    return copy.deepcopy(fold_entame(model))


def fold_through_compile(model):
    fold_entame(torch.compile(model, backend="eager"))
    return model


@pytest.mark.parametrize(
    "finish",
    [fold, fold_then_copy, fold_through_compile, lambda model: model],
    ids=["fold", "copy", "compile", "never"],
)
@pytest.mark.parametrize("source", SOURCES)
def test_loads_in_timm_and_in_transformers(tmp_path, source, finish):
    model = apply_entame(SOURCES[source](tmp_path), EntameConfig(phi_w=0.1))
    # Keys of text sort otherwise than numbers.
    model.config.id2label = {str(index): f"c{index}" for index in reversed(range(model.config.num_labels))}
    model.train()(IMAGES)
    expected = model.eval()(IMAGES).logits
    finish(model).save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["label_names"] == [f"c{index}" for index in range(model.config.num_labels)]
    in_timm = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    torch.testing.assert_close(in_timm(IMAGES), expected, rtol=1e-4, atol=1e-4)
    in_transformers = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(in_transformers(IMAGES).logits, expected, rtol=1e-4, atol=1e-4)
    assert in_transformers.config.id2label[1] == "c1"


def test_a_wrapper_of_ours_that_was_never_adapted_loads_in_timm_too(tmp_path):
    model = wrapped().eval()
    model.save_pretrained(tmp_path)
    in_timm = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(in_timm(IMAGES), model(IMAGES).logits)


def test_the_config_in_memory_stays_as_it_is(tmp_path):
    model = apply_entame(from_config())
    before = copy.deepcopy(vars(model.config))
    model.save_pretrained(tmp_path)
    after = vars(model.config)
    assert {name: after[name] for name in before if name not in ("dtype", "architectures")} == {
        name: value for name, value in before.items() if name not in ("dtype", "architectures")
    }


def test_a_head_without_a_bias_is_refused(tmp_path, tiny_vit):
    tiny_vit.classifier = torch.nn.Linear(32, 10, bias=False)
    apply_entame(tiny_vit)
    with pytest.raises(InputError, match=r"`classifier` has no bias"):
        tiny_vit.save_pretrained(tmp_path)


def test_an_own_loop_saves_what_it_evaluates(tmp_path, tiny_vit):
    model = apply_entame(tiny_vit)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(model.train()(IMAGES).logits, LABELS).backward()
        optimizer.step()
    model.save_pretrained(tmp_path)
    again = ViTForImageClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(again(IMAGES).logits, model.eval()(IMAGES).logits, rtol=1e-4, atol=1e-4)
