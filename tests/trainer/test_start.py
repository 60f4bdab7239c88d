"""How a run starts: which config counts."""

import logging

import pytest
import timm
import torch
from accelerate import cpu_offload
from conftest import RandomImages
from transformers import TrainingArguments

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError, apply_entame
from entame_hf.patch import applied_config, as_transformers
from entame_hf.trainer.start import resolve_config
from entame_hf.training_args import HeadArguments

APPLIED = EntameConfig(phi_w=1e-8, feature_norm=False)


@pytest.mark.parametrize(
    ("entame", "args", "applied", "expected"),
    [
        (None, {}, None, EntameConfig()),
        (None, {"recipe": "recommended"}, None, EntameConfig()),
        (None, {"recipe": "recommended"}, APPLIED, APPLIED),
        (None, {}, APPLIED, APPLIED),
        (None, {"phi_w": 1e-12}, APPLIED, EntameConfig(feature_norm=False)),
        (None, {"znorm_momentum": 1.0, "znorm_sync": True}, EntameConfig(momentum=0.1, sync=False), EntameConfig()),
        (None, {"entame_method": "entame"}, APPLIED, EntameConfig()),
        (EntameConfig.for_method("base"), {"entame_method": "mei"}, APPLIED, EntameConfig.for_method("base")),
    ],
    ids=["nothing", "recipe", "applied-over-recipe", "applied", "a-default", "defaults", "method", "argument"],
)
def test_the_config_that_takes_precedence(tiny_vit, entame, args, applied, expected):
    if applied is not None:
        apply_entame(tiny_vit, applied)
    assert resolve_config(entame, HeadArguments(**args), tiny_vit) == expected


@pytest.mark.parametrize(
    ("entame", "given", "message"),
    [
        (None, {"entame_method": "entame"}, "training arguments (feature_norm=True, phi_w=1e-12) override the config"),
        (None, {"phi_w": 1e-12}, "training arguments (phi_w=1e-12) override the config that apply_entame got"),
        (EntameConfig(phi_w=1e-9), {"phi_w": 1e-12}, "`entame` (feature_norm=True, phi_w=1e-09) override"),
    ],
    ids=["method", "field", "argument"],
)
def test_sources_that_disagree_are_logged(tmp_path, tiny_vit, caplog, monkeypatch, entame, given, message):
    monkeypatch.setattr(logging.getLogger("entame_hf"), "propagate", True)
    args = EntameTrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, **given)
    trainer = EntameTrainer(apply_entame(tiny_vit, APPLIED), args, train_dataset=RandomImages(8), entame=entame)
    trainer.train()
    assert message in caplog.text
    assert applied_config(tiny_vit) == trainer.entame_config()


def test_sources_that_agree_are_not_logged(tmp_path, tiny_vit, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("entame_hf"), "propagate", True)
    args = EntameTrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, phi_w=1e-8)
    EntameTrainer(apply_entame(tiny_vit, APPLIED), args, train_dataset=RandomImages(8)).train()
    assert "override" not in caplog.text


def test_trainer_without_arguments_builds_its_own(tiny_vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert isinstance(EntameTrainer(tiny_vit).args, EntameTrainingArguments)


def test_plain_arguments_get_the_defaults_of_the_heads_options(tiny_vit, tmp_path):
    trainer = EntameTrainer(tiny_vit, TrainingArguments(str(tmp_path), report_to="none"))
    assert trainer.entame_config() == EntameConfig()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_logged_with_what_to_type(tiny_vit, tmp_path, caplog, monkeypatch, dtype):
    monkeypatch.setattr(logging.getLogger("entame_hf"), "propagate", True)
    EntameTrainer(tiny_vit.to(dtype), TrainingArguments(str(tmp_path), report_to="none"))
    assert f"The model's weights are {str(dtype).removeprefix('torch.')}" in caplog.text
    assert "from_pretrained(..., dtype=torch.float32), and set bf16=True" in caplog.text


def test_a_frozen_backbone_in_half_precision_is_not_logged(tiny_vit, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("entame_hf"), "propagate", True)
    tiny_vit.vit.to(torch.bfloat16).requires_grad_(False)
    EntameTrainer(tiny_vit, TrainingArguments(str(tmp_path), report_to="none"))
    assert "weights are" not in caplog.text


@pytest.mark.parametrize("part", ["", "timm_model.fc", "timm_model.layer1"], ids=["all", "head", "a layer"])
def test_an_offloaded_model_is_refused(tmp_path, part):
    model = as_transformers(timm.create_model("test_resnet", num_classes=10))
    cpu_offload(model.get_submodule(part))
    with pytest.raises(InputError, match=r"is offloaded.*without `device_map`"):
        EntameTrainer(model, EntameTrainingArguments(str(tmp_path), use_cpu=True))
