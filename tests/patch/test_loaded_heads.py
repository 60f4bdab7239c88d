"""A head that has learned is not wiped, whichever library loaded it."""

import copy
import json

import pytest
import timm
import torch
from conftest import RandomImages
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError, apply_entame, find_heads
from entame_hf.patch import has_trained_head

LORA = LoraConfig(r=2, target_modules=["q_proj", "query"], modules_to_save=["classifier"])


def train(folder, model, trainer=EntameTrainer, arguments=EntameTrainingArguments, **options):
    options = {"max_steps": 2, "save_strategy": "no", "disable_tqdm": True, "report_to": "none", **options}
    args = arguments(str(folder), use_cpu=True, per_device_train_batch_size=16, **options)
    made = trainer(model, args, train_dataset=RandomImages(32))
    made.train()
    return made


@pytest.fixture(scope="module")
def timm_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timm")
    train(folder, timm.create_model("test_resnet", num_classes=10)).save_model()
    return folder


def test_timm_says_that_a_head_was_adapted(timm_folder, tmp_path):
    model = timm.create_model(f"local-dir:{timm_folder}", pretrained=True)
    assert has_trained_head(model)
    with pytest.raises(InputError, match="was adapted with ENTAME before"):
        apply_entame(copy.deepcopy(model))
    with pytest.raises(InputError, match="was adapted with ENTAME before"):
        train(tmp_path, copy.deepcopy(model))
    before = model.state_dict()["fc.weight"].clone()
    kept = apply_entame(copy.deepcopy(model), EntameConfig(init="keep"))
    assert torch.equal(kept.state_dict()["fc.weight"], before)
    new = apply_entame(model, num_labels=10)
    assert new.state_dict()["fc.weight"].std() < 1e-5
    # Once more, as a cell of a notebook.
    apply_entame(new)


def test_other_classes_of_timm_are_new(timm_folder):
    model = timm.create_model(f"local-dir:{timm_folder}", pretrained=True, num_classes=7)
    assert not has_trained_head(model)
    apply_entame(model)


def notes_of(folder) -> list[str]:
    return json.loads((folder / "config.json").read_text())["pretrained_cfg"]["notes"]


def test_a_note_is_about_one_head(timm_folder, tmp_path):
    (first,) = notes_of(timm_folder)
    model = timm.create_model(f"local-dir:{timm_folder}", pretrained=True)
    model.pretrained_cfg["notes"] = ["mine", *model.pretrained_cfg["notes"]]
    train(tmp_path, model, entame_method="keep", learning_rate=1e-2, save_dtype="bfloat16").save_model()
    mine, second = notes_of(tmp_path)
    assert (mine, first.rpartition(" ")[0]) == ("mine", second.rpartition(" ")[0])
    assert first != second
    # Saved in bfloat16, and loaded in float32.
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert has_trained_head(loaded)


@pytest.mark.parametrize("replace", ["weights", "reset", "module", "stock"])
def test_another_head_of_as_many_classes_is_new(timm_folder, replace):
    options = {"pretrained": replace != "weights"}
    model = timm.create_model(f"local-dir:{timm_folder}", **options)
    if replace == "reset":
        model.reset_classifier(10)
    elif replace == "module":
        model.fc = torch.nn.Linear(model.fc.in_features, 10)
    elif replace == "stock":
        model.load_state_dict(timm.create_model("test_resnet", num_classes=10).state_dict())
    assert not has_trained_head(model)
    assert apply_entame(model).fc.weight.std() < 1e-5


@pytest.mark.parametrize("kinds", [(Trainer, TrainingArguments), (EntameTrainer, EntameTrainingArguments)])
def test_an_adapters_head_is_not_wiped(tmp_path, tiny_vit, kinds):
    # A new adapter has a new head, whose copies are alike.
    adapted = get_peft_model(copy.deepcopy(tiny_vit), LORA)
    assert not has_trained_head(adapted)
    train(tmp_path / "a", adapted, *kinds, learning_rate=1e-3).save_model(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(tiny_vit), tmp_path / "adapter", is_trainable=True)
    assert has_trained_head(loaded)
    ((path, head),) = [(each.path, each.module) for each in find_heads(loaded)]
    before = head.weight.detach().clone()
    for refused in (apply_entame, lambda model: train(tmp_path / "b", model)):
        with pytest.raises(InputError, match=f"`{path}` has learned in this adapter"):
            refused(copy.deepcopy(loaded))
    train(tmp_path / "c", loaded, entame_method="keep", learning_rate=1e-9)
    torch.testing.assert_close(find_heads(loaded)[0].module.weight, before, rtol=1e-3, atol=1e-6)


def test_another_layer_that_an_adapter_saves_is_no_head(tmp_path, tiny_vit):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["classifier", "fc1"])
    adapted = get_peft_model(copy.deepcopy(tiny_vit), config)
    changed = [each for name, each in adapted.named_parameters() if ".fc1.modules_to_save." in name]
    for parameter in changed:
        parameter.data.add_(1)
    assert changed
    assert not has_trained_head(adapted)
    apply_entame(adapted)
