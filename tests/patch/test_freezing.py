"""Linear probing: nothing but the head moves."""

import copy
import hashlib
import pickle

import pytest
import timm
import torch
from conftest import CLASSIFIERS, RandomImages
from torch import nn
from torchvision.ops import StochasticDepth

from entame_hf import EntameTrainer, EntameTrainingArguments, apply_entame, find_heads
from entame_hf.patch import frozen_backbone, frozen_statistics


def digest(model, leaf):
    """Hash every parameter and buffer of a model but those of its head."""
    own = {id(tensor) for tensor in leaf.state_dict(keep_vars=True).values()}
    hashed = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if id(tensor) not in own:
            hashed.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def arguments(folder, **changes):
    defaults = {"max_steps": 3, "per_device_train_batch_size": 16, "save_strategy": "no", "report_to": "none"}
    return EntameTrainingArguments(str(folder), **{**defaults, **changes})


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "free"])
@pytest.mark.parametrize("kind", ["timm-resnet", "timm-efficientnet", "timm-convnext", "hf-resnet", "hf-vit"])
def test_parameters_and_running_statistics_stand_still(tmp_path, kind, freeze):
    factory, side, _ = CLASSIFIERS[kind]
    options = arguments(tmp_path, freeze_backbone=freeze, learning_rate=1e-2)
    trainer = EntameTrainer(factory(10), options, train_dataset=RandomImages(48, side))
    model = trainer.model
    (head,) = find_heads(model)
    before = digest(model, head.module)
    trainer.train()
    assert (digest(model, head.module) == before) == freeze
    # Drawn at φ_w = 1e-12, a head that has learned is far larger.
    assert head.module.weight.abs().mean() > 1e-3
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.train()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "free"])
@pytest.mark.parametrize("kind", ["timm-resnet", "timm-efficientnet", "hf-resnet"])
def test_running_statistics_stand_still_while_all_parameters_learn(tmp_path, kind, freeze):
    factory, side, _ = CLASSIFIERS[kind]
    options = arguments(tmp_path, freeze_statistics=freeze, learning_rate=1e-2, znorm_refresh_samples=0)
    trainer = EntameTrainer(factory(10), options, train_dataset=RandomImages(48, side))
    model, modes = trainer.model, []
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    before = copy.deepcopy(model.state_dict())
    layers[0].register_forward_hook(lambda layer, *_: modes.append(layer.training))
    trainer.train()
    assert modes == [not freeze] * 3
    after = model.state_dict()
    statistics = [name for name in before if "running_" in name]
    assert len(statistics) == 2 * len(layers)
    assert all(torch.equal(before[name], after[name]) == freeze for name in statistics)
    assert not any(torch.equal(before[name], after[name]) for name, _ in model.named_parameters())
    model.train()
    assert all(module.training for module in model.modules())


def test_nothing_changes_without_running_statistics(tmp_path, tiny_vit):
    other, data = copy.deepcopy(tiny_vit), RandomImages(48)
    EntameTrainer(tiny_vit, arguments(tmp_path), train_dataset=data).train()
    EntameTrainer(other, arguments(tmp_path, freeze_statistics=True), train_dataset=data).train()
    assert all(map(torch.equal, tiny_vit.state_dict().values(), other.state_dict().values()))


def test_a_resumed_run_is_frozen_too(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    options = {"freeze_backbone": True, "save_strategy": "steps", "save_steps": 1}
    EntameTrainer(model, arguments(tmp_path, max_steps=1, **options), train_dataset=RandomImages(48)).train()
    resumed = timm.create_model("test_resnet", num_classes=10)
    trainer = EntameTrainer(resumed, arguments(tmp_path, **options), train_dataset=RandomImages(48))
    before = digest(model, model.fc)
    trainer.train(resume_from_checkpoint=True)
    assert digest(resumed, resumed.fc) == before
    assert trainer.state.global_step == 3


def test_features_are_a_fixed_function_while_the_head_s_dropout_goes_on():
    model = nn.Module()
    model.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), StochasticDepth(0.5, "row"))
    model.drop, model.fc = nn.Dropout(0.5), nn.Linear(4, 3)
    with frozen_backbone(model, find_heads(model, "fc")):
        model.train()
        assert not any(module.training for module in model.backbone.modules())
        assert all(module.training for module in (model, model.drop, model.fc))
        model.eval().train()
        assert model.fc.training
        assert not model.backbone[1].training


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_clones_of_a_frozen_model_are_frozen_on_their_own(clone):
    model = apply_entame(timm.create_model("test_resnet", num_classes=10))
    with frozen_backbone(model, find_heads(model)):
        cloned = clone(model)
    model.train()
    cloned.train()
    assert model.bn1.training
    assert not cloned.bn1.training
    assert cloned.fc.training


@pytest.mark.parametrize("inner", ["freeze_backbone", "freeze_statistics"])
def test_what_stood_still_before_a_training_does_so_afterwards(tmp_path, inner):
    trainer = EntameTrainer(
        timm.create_model("test_resnet", num_classes=10),
        arguments(tmp_path, **{inner: True}),
        train_dataset=RandomImages(48),
    )
    model = trainer.model
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with frozen_statistics(model):
        trainer.train()
        model.train()
        assert not any(layer.training for layer in layers)
    model.train()
    assert all(layer.training for layer in layers)
