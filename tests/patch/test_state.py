"""What `apply_entame` leaves stands on the heads: it is derived again after whatever replaces or changes them."""

import copy
import math
import pickle

import pytest
import timm
import torch
import torch.distributed as dist
from conftest import TINY_VIT, logits_of
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from entame_hf import EntameConfig, InputError, ZNormLinear, apply_entame, find_heads, fold_entame
from entame_hf.patch import (
    applied_config,
    as_transformers,
    class_names,
    clear_entame_state,
    has_trained_head,
    set_trained,
)

IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 10


def resnet(classes=10):
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=classes)


def wrapped():
    return as_transformers(resnet())


def starts_at_maximum_entropy(model, method="entame"):
    (head,) = find_heads(model)
    assert isinstance(head.module, ZNormLinear) == (method == "entame")
    assert head.module.weight.abs().max() < 1e-4
    loss = cross_entropy(logits_of(model.train(), IMAGES), LABELS)
    return loss.item() == pytest.approx(math.log(10), abs=1e-3)


def reset_classifier(model):
    model.timm_model.reset_classifier(10)


def replace_head(model):
    model.timm_model.fc = nn.Linear(model.timm_model.fc.in_features, 10)


def load_stock_weights(model):
    model.load_state_dict(wrapped().state_dict())


def load_head_alone(model):
    model.timm_model.fc.load_state_dict(resnet().fc.state_dict())


def fold_inner(model):
    fold_entame(model.timm_model)


def fold_compiled(model):
    fold_entame(torch.compile(model, backend="eager"))


def fold_data_parallel(model):
    fold_entame(DataParallel(model))


@pytest.mark.parametrize("method", ["mei", "entame"])
@pytest.mark.parametrize(
    "change",
    [
        reset_classifier,
        replace_head,
        load_stock_weights,
        load_head_alone,
        fold_entame,
        fold_inner,
        fold_compiled,
        fold_data_parallel,
    ],
    ids=lambda change: change.__name__,
)
def test_applies_again_after(change, method):
    config = EntameConfig.for_method(method)
    model = apply_entame(wrapped(), config)
    nn.init.normal_(model.timm_model.fc.weight)
    change(model)
    assert applied_config(model) is None
    assert starts_at_maximum_entropy(apply_entame(model, config), method)
    assert applied_config(model) == config


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPERS = {
    "compile": lambda model: torch.compile(model, backend="eager"),
    "data-parallel": DataParallel,
    "ddp": DistributedDataParallel,
    "ddp-of-compile": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("build", [resnet, wrapped], ids=["timm", "transformers"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.runs
def test_applies_and_folds_through_a_wrapper(process_group, wrapper, build):
    torch._dynamo.reset()
    inner = build().double()
    model = WRAPPERS[wrapper](inner)
    (head,) = find_heads(model)
    assert model.get_submodule(head.path) is find_heads(inner)[0].module is head.module
    apply_entame(model, EntameConfig(phi_w=0.1), num_labels=7)
    assert applied_config(model) == applied_config(inner) == EntameConfig(phi_w=0.1)
    model.train()(IMAGES.double())
    expected = logits_of(model.eval(), IMAGES.double())
    assert expected.shape == (16, 7)
    assert fold_entame(model) is model
    assert type(find_heads(inner)[0].module) is nn.Linear
    torch.testing.assert_close(logits_of(inner, IMAGES.double()), expected)
    torch.testing.assert_close(logits_of(model, IMAGES.double()), expected)


@pytest.mark.parametrize("part", ["model", "head"])
@pytest.mark.runs
def test_a_model_that_was_compiled_in_place_normalises_once_entame_is_applied(part):
    torch._dynamo.reset()
    model = resnet().train()
    (model if part == "model" else model.fc).compile(backend="eager")
    model(IMAGES)
    apply_entame(model, EntameConfig(phi_w=0.1))
    twin = copy.deepcopy(model)
    twin._compiled_call_impl = twin.fc._compiled_call_impl = None
    torch.testing.assert_close(model(IMAGES), twin(IMAGES))
    assert model.fc.znorm.largest_batch == 16
    expected = model.eval()(IMAGES)
    torch.testing.assert_close(fold_entame(model)(IMAGES), expected, rtol=1e-4, atol=1e-4)


def test_one_of_two_heads_that_was_replaced_is_drawn_alone():
    model = nn.ModuleDict({"a": nn.Linear(6, 4), "b": nn.Linear(6, 4)})
    config = EntameConfig(head=["a", "b"])
    apply_entame(model, config)
    kept = model["a"].weight.clone()
    model["b"] = nn.Linear(6, 4)
    apply_entame(model, config)
    assert torch.equal(model["a"].weight, kept)
    assert model["b"].weight.abs().max() < 1e-4
    assert applied_config(model) == config


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_state_belongs_to_each_clone(clone):
    model = apply_entame(wrapped(), EntameConfig.for_method("mei"))
    twin = clone(model)
    load_stock_weights(twin)
    assert applied_config(twin) is None
    assert applied_config(model) == EntameConfig.for_method("mei")
    assert twin.timm_model.fc.weight.std() > 1e-3


def test_a_wrapper_has_the_state_of_the_model_inside():
    config = EntameConfig(head="fc", momentum=0.5)
    model = as_transformers(apply_entame(resnet(), config))
    assert applied_config(model) == EntameConfig(head=["timm_model.fc"], momentum=0.5)
    set_trained(model)
    assert has_trained_head(model.timm_model)
    with pytest.raises(InputError, match="adapted with ENTAME before"):
        apply_entame(model, EntameConfig.for_method("mei"))
    clear_entame_state(model)
    apply_entame(model, EntameConfig.for_method("mei"))


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cross_entropy(logits_of(model.train(), IMAGES), LABELS).backward()
    optimizer.step()


class TestATrainedHead:
    @pytest.mark.parametrize("method", ["mei", "entame", "base"])
    def test_of_an_own_loop_is_kept_by_the_same_config_and_refused_by_others(self, method):
        config = EntameConfig.for_method(method)
        model = apply_entame(resnet(), config)
        step(model)
        trained = model.fc.weight.clone()
        apply_entame(model, config)
        assert torch.equal(model.fc.weight, trained)
        for again in ({"config": EntameConfig(phi_w=1e-8)}, {"config": config, "generator": torch.Generator()}):
            with pytest.raises(InputError, match=r"`fc` was adapted.*num_labels"):
                apply_entame(model, **again)
        assert torch.equal(model.fc.weight, trained)
        assert apply_entame(model, config, num_labels=10).fc.bias.abs().max() == 0

    def saved(self, folder):
        model = apply_entame(wrapped())
        step(model)
        model.config.entame = {"num_labels": 10}
        model.save_pretrained(folder)
        return AutoModelForImageClassification.from_pretrained(folder)

    def test_of_a_checkpoint_is_refused(self, tmp_path):
        model = self.saved(tmp_path)
        assert has_trained_head(model)
        with pytest.raises(InputError, match="adapted with ENTAME before"):
            apply_entame(model)

    @pytest.mark.parametrize("change", [reset_classifier, replace_head])
    def test_of_a_checkpoint_that_was_replaced_since_is_none(self, tmp_path, change):
        model = self.saved(tmp_path)
        change(model)
        assert not has_trained_head(model)
        assert starts_at_maximum_entropy(apply_entame(model))


class TestKeepWithOtherClasses:
    """With `num_labels`, a kept head is rebuilt, also for as many classes as before."""

    def test_of_the_same_number_is_rebuilt(self):
        model = resnet()
        before = model.fc.weight.clone()
        apply_entame(model, EntameConfig.for_method("keep"), num_labels=10)
        assert not torch.equal(model.fc.weight, before)
        assert model.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)

    def test_is_kept_without_num_labels(self):
        model = resnet()
        before = model.fc.weight.clone()
        assert torch.equal(apply_entame(model, EntameConfig.for_method("keep")).fc.weight, before)


class TestCountsThatDisagree:
    def vit(self, classes=10):
        return ViTForImageClassification(ViTConfig(num_labels=classes, **TINY_VIT))

    @pytest.mark.parametrize("build", ["vit", "wrapper"])
    @pytest.mark.parametrize("outputs", [7, 1000])
    def test_a_head_replaced_by_hand_is_refused_with_both_numbers(self, build, outputs):
        if build == "vit":
            model = self.vit()
            model.classifier = nn.Linear(32, outputs)
        else:
            model = wrapped()
            model.timm_model.fc = nn.Linear(model.timm_model.fc.in_features, outputs)
        with pytest.raises(InputError, match=rf"has {outputs} outputs and `config.num_labels` is 10") as refused:
            apply_entame(model)
        assert "\n" not in str(refused.value)
        # The remedy that it names.
        model.config.num_labels = outputs
        assert logits_of(apply_entame(model), IMAGES).shape == (16, outputs)

    def test_num_labels_settles_it(self):
        model = self.vit()
        model.classifier = nn.Linear(32, 7)
        apply_entame(model, EntameConfig(head="classifier"), num_labels=7)
        assert model.config.num_labels == model.num_labels == len(model.config.id2label) == 7

    def test_a_bare_timm_model_counts_by_its_head(self):
        model = resnet()
        model.fc = nn.Linear(model.fc.in_features, 7)
        wrapper = as_transformers(model)
        assert wrapper.config.num_labels == wrapper.timm_model.num_classes == 7
        assert logits_of(apply_entame(wrapper), IMAGES).shape == (16, 7)

    @pytest.mark.parametrize("build", ["vit", "timm"])
    def test_a_model_without_classes_is_refused(self, build):
        model = self.vit(0) if build == "vit" else timm.create_model("test_resnet", num_classes=0)
        with pytest.raises(InputError, match=r"without a classifier head.*num_(classes|labels)=10"):
            apply_entame(model)


@pytest.mark.parametrize("keys", [int, str], ids=["int", "str"])
def test_names_of_classes_are_in_the_order_of_their_numbers(keys):
    config = wrapped().config
    config.id2label = {keys(index): f"c{index}" for index in (11, 10, 2, 1, 0, 3, 4, 5, 6, 7, 8, 9)}
    assert class_names(config) == [f"c{index}" for index in range(12)]


def test_a_kept_head_starts_again_from_its_first_state(tiny_vit):
    model = apply_entame(tiny_vit, EntameConfig(init="keep")).train()
    before = copy.deepcopy(model.state_dict())
    images = torch.randn(16, 3, 32, 32)
    first = model(images).logits
    assert not model.classifier.znorm.unfold_next
    # With the statistics of a batch, it is rewritten already.
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert not model.classifier.znorm.unfold_next
    model.load_state_dict(before)
    torch.testing.assert_close(model(images).logits, first)
    drawn = apply_entame(fold_entame(model), num_labels=10).train()
    drawn.load_state_dict(copy.deepcopy(drawn.state_dict()))
    assert not drawn.classifier.znorm.unfold_next
