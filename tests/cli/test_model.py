"""Models are loaded in float32 and whole, or refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from cli_folders import hf_folder, timm_folder  # noqa: F401
from conftest import TINY_VIT
from transformers import (
    AutoModelForImageClassification,
    BeitConfig,
    BeitForImageClassification,
    BeitForMaskedImageModeling,
    Data2VecVisionConfig,
    Data2VecVisionModel,
    SwinConfig,
    SwinForMaskedImageModeling,
    ViTImageProcessor,
)

from entame_hf import InputError, find_heads
from entame_hf.cli.model import load_classifier, load_trained

NAMES = ["a", "b", "c"]


@pytest.fixture(params=["timm", "transformers"])
def folder(request, tmp_path, timm_folder, hf_folder):  # noqa: F811
    """A copy of a pretrained model's folder, to be damaged."""
    return shutil.copytree(timm_folder if request.param == "timm" else hf_folder, tmp_path / "model")


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def change_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_are_float32_whatever_the_checkpoint_holds(folder, dtype, tmp_path):
    AutoModelForImageClassification.from_pretrained(folder, dtype=dtype).save_pretrained(folder)
    model, _ = load_classifier(str(folder), NAMES)
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.float32}
    model.save_pretrained(tmp_path / "saved")
    saved = safetensors.torch.load_file(tmp_path / "saved" / "model.safetensors")
    assert {t.dtype for t in saved.values() if t.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_model_of_another_problem_is_trained_with_cross_entropy(folder, kind, caplog):
    change_config(folder, problem_type=kind)
    model, _ = load_classifier(str(folder), NAMES)
    assert model.config.problem_type == "single_label_classification"
    assert caplog.text.count(f"is a model of {kind}: it is trained with cross-entropy") == 1
    labels = torch.tensor([0, 2])
    output = model(torch.zeros(2, 3, 32, 32), labels=labels)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 1000),
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100]),
        lambda folder: (folder / "model.safetensors").unlink(),
    ],
    ids=["empty", "no safetensors", "cut off", "missing"],
)
def test_damaged_weights_are_refused(folder, damage):
    damage(folder)
    with pytest.raises(InputError, match="Cannot load `model_name_or_path=") as error:
        load_classifier(str(folder), NAMES)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {k: v for k, v in state.items() if k != next(k for k, v in state.items() if v.ndim == 4)},
        lambda state: {k: v for k, v in state.items() if "running_var" not in k},
        lambda state: {k: v[:1].clone() if v.ndim == 4 else v for k, v in state.items()},
        lambda state: {f"module.{k}": v for k, v in state.items()},
    ],
    ids=["one missing", "statistics missing", "other shape", "other names"],
)
def test_a_backbone_that_is_not_whole_is_refused(folder, change):
    change_weights(folder, change)
    with pytest.raises(InputError, match=r"lacks [0-9]+ tensors of the backbone, .* such as .*\."):
        load_classifier(str(folder), NAMES)


def test_a_head_may_be_missing(folder):
    change_weights(folder, lambda state: {k: v for k, v in state.items() if not k.startswith(("fc", "classifier"))})
    model, _ = load_classifier(str(folder), NAMES)
    assert model.config.num_labels == 3
    with pytest.raises(InputError, match="not a trained classifier: it lacks 2 tensors"):
        load_trained(str(folder))


@pytest.mark.parametrize(
    "pretrained",
    [
        BeitForMaskedImageModeling(BeitConfig(**TINY_VIT)),
        Data2VecVisionModel(Data2VecVisionConfig(**TINY_VIT)),
        SwinForMaskedImageModeling(
            SwinConfig(image_size=32, embed_dim=16, depths=[1, 1], num_heads=[1, 2], window_size=4, encoder_stride=8)
        ),
    ],
    ids=["BEiT", "Data2Vec", "Swin"],
)
def test_a_backbone_that_was_pretrained_alone_is_enough(tmp_path, pretrained):
    pretrained.save_pretrained(tmp_path)
    ViTImageProcessor().save_pretrained(tmp_path)
    model, _ = load_classifier(str(tmp_path), NAMES)
    assert model.config.num_labels == 3
    backbone = getattr(pretrained, pretrained.base_model_prefix, pretrained).state_dict()
    loaded = getattr(model, model.base_model_prefix).state_dict()
    assert loaded.keys() - backbone.keys() <= {"pooler.layernorm.weight", "pooler.layernorm.bias"}
    assert all(torch.equal(tensor, backbone[name]) for name, tensor in loaded.items() if name in backbone)


def test_a_pooler_that_a_trained_classifier_lacks_is_refused(tmp_path):
    BeitForImageClassification(BeitConfig(**TINY_VIT)).save_pretrained(tmp_path)
    ViTImageProcessor().save_pretrained(tmp_path)
    change_weights(tmp_path, lambda state: {k: v for k, v in state.items() if "pooler" not in k})
    with pytest.raises(InputError, match="lacks 2 tensors of the backbone"):
        load_classifier(str(tmp_path), NAMES)


@pytest.mark.parametrize(
    "text", ["null", "[]", '"x"', "", "{", '{"model_type": null}', '{"model_type": 3}', '{"model_type": "gpt2"}']
)
def test_odd_configurations_are_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match="Cannot load `model_name_or_path="):
        load_classifier(str(folder), NAMES)


@pytest.mark.parametrize("id2label", [["a", "b"], 3, "a"], ids=str)
def test_odd_class_names_are_refused(folder, id2label):
    change_config(folder, id2label=id2label)
    with pytest.raises(InputError, match="its configuration is damaged"):
        load_classifier(str(folder), NAMES)


def with_classes(folder: Path, names: list[str] | None) -> torch.Tensor:
    """Give the checkpoint three classes; returns the head's weights."""
    model = AutoModelForImageClassification.from_pretrained(folder, num_labels=3, ignore_mismatched_sizes=True)
    if names:
        model.config.id2label, model.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
        # Where timm's models have theirs.
        model.config.label_names = names
    (head,) = find_heads(model)
    torch.nn.init.normal_(head.module.weight)
    model.config.model_args = {}
    model.save_pretrained(folder)
    return head.module.weight.detach().clone()


@pytest.mark.parametrize(
    ("names", "keeps", "message"),
    [
        (NAMES, True, ""),
        (["x", "y", "z"], False, "The checkpoint's classes are x, y, z, and the data's a, b, c: the head starts anew"),
        (["b", "a", "c"], False, "The checkpoint's classes are b, a, c, and the data's a, b, c: the head starts anew"),
        (None, True, "does not name its classes: its head is kept, in the order a, b, c"),
    ],
    ids=["same", "other", "other order", "unnamed"],
)
def test_a_head_is_kept_for_its_own_classes_alone(folder, names, keeps, message, caplog):
    weight = with_classes(folder, names)
    caplog.clear()
    model, _ = load_classifier(str(folder), NAMES, keeps_head=True)
    (head,) = find_heads(model)
    assert torch.equal(head.module.weight, weight) == keeps
    assert message in caplog.text
    assert bool(message) == bool(caplog.text)
    assert [model.config.id2label[i] for i in range(3)] == NAMES


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], "The checkpoint's classes are a, b, c, and the data's a, b: the head starts anew"),
        (["a", "b", "c", "d"], "the data's a, b, c, ...: the head starts anew"),
        (["x", "y"], ""),
    ],
    ids=["fewer", "more", "others"],
)
def test_a_head_of_another_number_of_the_same_classes_is_said_to_start_anew(folder, names, message, caplog):
    with_classes(folder, NAMES)
    caplog.clear()
    load_classifier(str(folder), names, keeps_head=True)
    assert message in caplog.text
    assert bool(message) == bool(caplog.text)
