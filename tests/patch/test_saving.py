"""What `save_pretrained` writes is the stock model: timm and transformers load it, and so do classes of one's own."""

import copy
import json

import pytest
import timm
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
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


@pytest.mark.parametrize("classes", [10, 2], ids=["as-many", "fewer"])
def test_classes_have_the_same_numbers_in_both_maps(tmp_path, tiny_vit, classes):
    tiny_vit.config.id2label = {index: f"old{index}" for index in range(10)}
    tiny_vit.config.label2id = {f"old{index}": index for index in range(10)}
    tiny_vit.save_pretrained(tmp_path / "old")
    names = {index: f"new{index}" for index in range(classes)}
    model = ViTForImageClassification.from_pretrained(tmp_path / "old", id2label=names, ignore_mismatched_sizes=True)
    apply_entame(model).save_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["label2id"] == {name: index for index, name in names.items()}


def test_classes_that_one_map_alone_names_keep_their_names(tmp_path, tiny_vit):
    tiny_vit.config.label2id = {f"class{index}": index for index in range(10)}
    apply_entame(tiny_vit).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["label2id"] == tiny_vit.config.label2id


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


class Own(nn.Module):
    """A model of one's own."""

    def __init__(self, classes: int = 10, bias: bool = True) -> None:
        super().__init__()
        self.backbone, self.fc = nn.Linear(3 * 32 * 32, 16), nn.Linear(16, classes, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.backbone(images.flatten(1)).relu())


class OnTheHub(Own, PyTorchModelHubMixin):
    """Its `from_pretrained` drops what it does not know, without a word."""


class SavesItself(Own):
    """A class with a method of the same name."""

    def save_pretrained(self, folder):
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pth")

    @classmethod
    def from_pretrained(cls, folder):
        model = cls()
        model.load_state_dict(torch.load(folder / "weights.pth"), strict=False)
        return model


def take_a_step(model):
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    cross_entropy(model(IMAGES), LABELS).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", [OnTheHub, SavesItself])
@pytest.mark.parametrize("around", [lambda model: model, copy.deepcopy], ids=["itself", "a-copy"])
def test_models_of_ones_own_save_the_stock_model(tmp_path, kind, around):
    model = apply_entame(kind(), EntameConfig(head="fc"))
    take_a_step(model)
    model = around(model)
    logits = model.eval()(IMAGES)
    before = copy.deepcopy(model.state_dict())
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(kind.from_pretrained(tmp_path / "saved").eval()(IMAGES), logits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_of_ones_own_without_a_bias_is_not_saved(tmp_path):
    model = apply_entame(OnTheHub(bias=False), EntameConfig(head="fc"))
    take_a_step(model)
    with pytest.raises(InputError, match="has no bias"):
        model.save_pretrained(tmp_path)
