"""A head whose `forward` or weight is not its own is normalised and folded, or refused: never passed over."""

import copy
import types

import pytest
import timm
import torch
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm

from entame_hf import EntameConfig, InputError, ZNormLinear, apply_entame, fold_entame
from entame_hf.patch import stock_state_dict

IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class Counter(ModelHook):
    """Counts the calls of a module, as accelerate's hooks see them."""

    calls = 0

    def pre_forward(self, module, *args, **kwargs):
        self.calls += 1
        return args, kwargs


def add_then_remove(model):
    add_hook_to_module(model.fc, ModelHook())
    remove_hook_from_module(model.fc)


HOOKED = {
    "device_map": lambda model: dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "two-devices": lambda model: dispatch_model(model, {"conv1": "cpu", "": "cpu"}, force_hooks=True),
    "align": lambda model: add_hook_to_module(model.fc, AlignDevicesHook("cpu", io_same_device=True)),
    "own": lambda model: add_hook_to_module(model.fc, Counter()),
    "two-hooks": lambda model: [add_hook_to_module(model.fc, Counter(), append=True) for _ in range(2)],
    "removed": add_then_remove,
    "bound": lambda model: vars(model.fc).update(forward=model.fc.forward),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hooked", HOOKED)
def test_hooks_of_accelerate_see_a_head_that_normalises_and_folds(hooked, when):
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10).double()
    config = EntameConfig(phi_w=0.1)
    expected = apply_entame(copy.deepcopy(model), config, generator=torch.Generator().manual_seed(0)).train()
    weight = model.fc.weight
    if when == "before":
        HOOKED[hooked](model)
    apply_entame(model, config, generator=torch.Generator().manual_seed(0))
    if when == "after":
        HOOKED[hooked](model)
    assert model.fc.weight is weight
    images = IMAGES.double()
    torch.testing.assert_close(model.train()(images), expected(images))
    logits = model.eval()(images)
    torch.testing.assert_close(logits, expected.eval()(images))
    assert type(fold_entame(model).fc) is nn.Linear
    torch.testing.assert_close(model(images), logits)


def test_a_hook_stays_on_a_head_through_apply_and_fold():
    model, hook = timm.create_model("test_resnet", num_classes=10), Counter()
    add_hook_to_module(model.fc, hook)
    for change in (apply_entame, fold_entame, apply_entame):
        change(model)(IMAGES)
    assert hook.calls == 3
    assert model.fc.znorm.largest_batch == 16


def replace_by_function(leaf):
    own = leaf.forward
    leaf.forward = lambda x: own(x)


def replace_by_method(leaf):
    leaf.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight), leaf)


def replace_by_compiled(leaf):
    leaf.forward = torch.compile(leaf.forward, backend="eager")


@pytest.mark.parametrize("replace", [replace_by_function, replace_by_method, replace_by_compiled])
def test_a_replaced_forward_is_refused_by_name(replace):
    model = timm.create_model("test_resnet", num_classes=10)
    replace(model.fc)
    for config in (EntameConfig(), EntameConfig(init="keep"), EntameConfig.for_method("fn")):
        with pytest.raises(InputError, match=r"`fc.forward` was replaced.*del model.fc.forward"):
            apply_entame(model, config)
    assert type(model.fc) is nn.Linear
    # Nothing is normalised, so nothing is passed over.
    apply_entame(model, EntameConfig.for_method("mei"))
    del model.fc.forward
    apply_entame(model)
    replace(model.fc)
    with pytest.raises(InputError, match=r"`fc.forward` was replaced"):
        fold_entame(model)
    assert isinstance(model.fc, ZNormLinear)


def test_an_offloaded_head_is_refused():
    model = cpu_offload(timm.create_model("test_resnet", num_classes=10))
    with pytest.raises(InputError, match="offloaded"):
        apply_entame(model)
    model = cpu_offload(apply_entame(timm.create_model("test_resnet", num_classes=10)))
    with pytest.raises(InputError, match="offloaded"):
        fold_entame(model)


@pytest.mark.parametrize("computed", [parametrizations.weight_norm, parametrizations.spectral_norm, weight_norm])
@pytest.mark.parametrize("method", ["mei", "entame", "keep"])
@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_is_computed_is_refused(computed, method):
    model = timm.create_model("test_resnet", num_classes=10)
    computed(model.fc)
    with pytest.raises(InputError, match=r"`fc.weight` is computed"):
        apply_entame(model, EntameConfig.for_method(method))


class SeveralHeads(nn.Module):
    """A model of one's own, whose heads may share a weight or be one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x).relu()
        return self.first(features) + self.second(2 * features + 1)


HEADS = EntameConfig(head=["first", "second"])


@pytest.mark.parametrize("heads", [["first", "second"], "first"], ids=["two-heads", "a-head-and-another-layer"])
@pytest.mark.parametrize("method", ["mei", "entame"])
def test_a_weight_that_is_shared_is_refused(heads, method):
    model = SeveralHeads()
    model.second.weight = model.first.weight
    with pytest.raises(InputError, match=r"`first.weight` is shared with `second`.*model.first.weight = torch.nn.Par"):
        apply_entame(model, EntameConfig.for_method(method, head=heads))
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())
    apply_entame(model, EntameConfig.for_method(method, head=heads))


def test_one_layer_under_two_names_is_folded_once():
    model = SeveralHeads()
    model.second = model.first
    images = torch.randn(16, 12)
    apply_entame(model, HEADS)(images).sum().backward()
    torch.nn.init.normal_(model.first.weight)
    logits = model.eval()(images)
    torch.testing.assert_close(fold_entame(model)(images), logits)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: parametrizations.weight_norm(model.first),
        lambda model: weight_norm(model.first),
        lambda model: prune.random_unstructured(model.first, "weight", 0.5),
        lambda model: setattr(model.second, "weight", model.first.weight),
    ],
    ids=["parametrize", "weight_norm", "prune", "shared"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_weight_that_was_shared_or_computed_since_is_not_folded(change):
    model = apply_entame(SeveralHeads(), HEADS)
    change(model)
    for fold in (fold_entame, stock_state_dict):
        with pytest.raises(InputError, match=r"`first.weight` is (computed|shared)"):
            fold(model)


@pytest.mark.filterwarnings("ignore")
def test_what_the_message_says_makes_a_pruned_head_fold():
    model = apply_entame(SeveralHeads(), HEADS)
    prune.random_unstructured(model.first, "weight", 0.5)
    images = torch.randn(16, 12)
    model(images)
    prune.remove(model.first, "weight")
    logits = model.eval()(images)
    torch.testing.assert_close(fold_entame(model)(images), logits)
