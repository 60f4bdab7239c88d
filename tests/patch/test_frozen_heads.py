"""A new head that could not learn, or that never normalises, is refused by name before it is trained or saved."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from entame_hf import EntameConfig, InputError, apply_entame, fit_head, fold_entame

IMAGES, LABELS = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8)


def train(model, steps=1):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(steps):
        cross_entropy(model(IMAGES).logits, LABELS).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("method", ["base", "mei", "fn", "entame", "informed"])
@pytest.mark.parametrize("part", ["classifier", "classifier.weight", ""], ids=["head", "weight", "model"])
def test_a_head_that_is_frozen_after_it_was_drawn_is_refused_by_name(tmp_path, tiny_vit, method, part):
    model = apply_entame(tiny_vit, EntameConfig.for_method(method))
    target = model.get_parameter(part) if part.endswith("weight") else model.get_submodule(part)
    target.requires_grad_(False)
    with pytest.raises(InputError, match="`classifier` is frozen") as error:
        model.train()(IMAGES)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="`classifier` is frozen"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_bare_timm_model_is_no_exception():
    model = apply_entame(timm.create_model("test_resnet", num_classes=8)).train()
    model.fc.requires_grad_(False)
    with pytest.raises(InputError, match="`fc` is frozen"):
        model(IMAGES)


@pytest.mark.parametrize(
    ("method", "training"),
    [("mei", True), ("mei", False), ("entame", True)],
    ids=["mei-training mode", "mei-evaluation mode", "entame-training mode"],
)
def test_a_head_that_has_learned_may_be_frozen(tmp_path, tiny_vit, method, training):
    model = apply_entame(tiny_vit, EntameConfig.for_method(method)).train(training)
    train(model)
    model.classifier.requires_grad_(False)
    train(model)
    model.requires_grad_(False).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


def test_a_kept_or_a_fitted_head_may_be_frozen(tiny_vit):
    kept = apply_entame(copy.deepcopy(tiny_vit), EntameConfig.for_method("keep")).train()
    fitted = apply_entame(tiny_vit, EntameConfig.for_method("informed"))
    fit_head(fitted, [(IMAGES, LABELS)])
    for model in (kept, fitted.train()):
        model.classifier.requires_grad_(False)
        train(model)


def test_the_check_leaves_nothing_behind(tiny_vit):
    model = apply_entame(tiny_vit)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        train(clone.train())
        assert "entame_check" not in vars(clone.classifier)
        assert not vars(clone.classifier)["_forward_hooks"]
    folded = fold_entame(apply_entame(tiny_vit, num_labels=8))
    assert not vars(folded.classifier)["_forward_hooks"]


def test_the_check_compiles_into_one_graph(tiny_vit):
    model = torch.compile(apply_entame(tiny_vit).train(), backend="eager", fullgraph=True)
    train(model)
    train(model)


# from_pretrained returns eval mode, and frozen BatchNorm is often had by eval() on all of the model.
@pytest.mark.parametrize("method", ["fn", "entame"])
@pytest.mark.parametrize("frozen", [False, True], ids=["whole model", "linear probe"])
def test_training_in_eval_mode_normalises_nothing_and_is_refused(tiny_vit, method, frozen):
    model = apply_entame(tiny_vit, EntameConfig.for_method(method)).eval()
    model.vit.requires_grad_(not frozen)
    before = model.classifier.weight.detach().clone()
    with pytest.raises(InputError, match=r"`classifier` is trained in eval mode.*model\.train\(\)") as error:
        train(model)
    assert "\n" not in str(error.value)
    assert torch.equal(model.classifier.weight, before)


def test_a_backbone_in_eval_mode_is_trained_with_a_head_that_normalises(tiny_vit):
    model = apply_entame(tiny_vit).eval()
    model.classifier.train()
    train(model)
    assert model.classifier.znorm.mean.any()
    # Such as Grad-CAM.
    model.eval()(IMAGES).logits.sum().backward()


def test_eval_mode_with_gradients_is_no_training(tiny_vit):
    model = apply_entame(tiny_vit).eval()
    model(IMAGES)
    # Their own statistics, or those of a stock model, need no training mode.
    for other in (EntameConfig.for_method("mei"), EntameConfig.for_method("keep")):
        train(apply_entame(copy.deepcopy(tiny_vit), other, num_labels=8).eval())
    stock = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: tensor for name, tensor in stock.items() if ".znorm." not in name})
    train(model)


@pytest.mark.parametrize(("images", "said"), [(1, True), (2, False)])
def test_a_first_batch_of_one_image_is_said_to_normalise_nothing(tiny_vit, caplog, images, said):
    apply_entame(tiny_vit).train()(IMAGES[:images]).logits.sum().backward()
    assert ("`classifier` is trained on holds one image" in caplog.text) == said


def test_one_image_with_positions_or_in_evaluation_is_normalised(caplog):
    leaf = nn.Sequential(nn.Conv2d(3, 4, 1))
    apply_entame(leaf, EntameConfig(head="0")).train()(IMAGES[:1])
    assert leaf[0].znorm.mean.any()
    apply_entame(nn.Sequential(nn.Linear(3, 4)), EntameConfig(head="0")).eval()(torch.ones(1, 3))
    assert "one image" not in caplog.text


def test_a_replica_of_data_parallel_cannot_carry_a_kept_head_over():
    leaf = nn.Sequential(nn.Linear(3, 4))
    kept = apply_entame(leaf, EntameConfig(init="keep", head="0")).train()
    # As DataParallel makes them: attributes that they set are lost.
    kept[0]._is_replica = True
    with pytest.raises(InputError, match="DataParallel would lose that"):
        kept(torch.randn(8, 3))
    kept.eval()(torch.randn(8, 3))
