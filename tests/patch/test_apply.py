import copy
import math
import pickle

import pytest
import timm
import torch
from conftest import logits_of
from torch import nn
from torch.nn.functional import cross_entropy

from entame_hf import EntameConfig, InputError, apply_entame, error_energy, find_heads, fold_entame
from entame_hf.patch import folded_parameters


def images(side, count=8, seed=1):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["mei", "entame"])
def test_step_0_is_at_maximum_entropy(classifier, method):
    build, side, _ = classifier
    model = apply_entame(build(1000), EntameConfig.for_method(method), num_labels=10).train()
    labels = torch.arange(8) % 10
    logits = logits_of(model, images(side))
    energy = error_energy(logits, labels)
    assert cross_entropy(logits, labels).item() == pytest.approx(math.log(10), abs=1e-4)
    assert float(energy.entropy) == pytest.approx(math.log(10), abs=1e-4)
    assert float(energy.noise_share) == pytest.approx(1 / 9, abs=1e-4)


def test_the_first_error_stops_at_the_head(classifier):
    build, side, path = classifier

    def gradient_at_the_features(method):
        torch.manual_seed(0)
        model = apply_entame(build(10), EntameConfig.for_method(method)).train()
        seen = []
        model.get_submodule(path).register_full_backward_hook(lambda module, gi, go: seen.append(gi[0]))
        cross_entropy(logits_of(model, images(side)), torch.arange(8)).backward()
        return seen[0].norm()

    assert gradient_at_the_features("mei") < 1e-4 * gradient_at_the_features("base")
    assert gradient_at_the_features("entame") < 1e-4 * gradient_at_the_features("fn")


@pytest.mark.parametrize(
    ("config", "variance"),
    [
        (EntameConfig(), 1e-12),
        (EntameConfig(phi_w=1e-6, feature_norm=False), 1e-6),
        (EntameConfig(noise_lambda=50.0), (1e-3 * 50 / 40) ** 2),
        (EntameConfig.for_method("base"), 2 / 40),
        (EntameConfig.for_method("fn"), 2 / 40),
    ],
    ids=["entame", "phi_w", "lambda", "base", "fn"],
)
def test_head_statistics(config, variance):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 40))
    head = apply_entame(model, EntameConfig(**{**config.to_dict(), "head": "1"}), learning_rate=1e-3)[1]
    weight = head.weight.detach().double()
    assert abs(float(weight.mean())) < 5 * math.sqrt(variance / weight.numel())
    assert float(weight.var()) == pytest.approx(variance, rel=0.05)
    assert torch.equal(head.bias, torch.zeros(40))


@pytest.mark.parametrize("method", ["base", "mei", "fn", "entame", "keep"])
def test_only_the_head_changes(classifier, method):
    build, _, path = classifier
    model = build(10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    dtypes = {name: (tensor.dtype, tensor.device) for name, tensor in before.items()}
    assert apply_entame(model, EntameConfig.for_method(method)) is model
    after = model.state_dict()
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    for name, tensor in before.items():
        assert dtypes[name] == (after[name].dtype, after[name].device)
        drawn = method != "keep" and name in (f"{path}.weight", f"{path}.bias")
        assert torch.equal(after[name], tensor) != drawn or not tensor.any(), name
    assert {name.rpartition(".znorm.")[0] or path for name in after.keys() - before.keys()} <= {path}


@pytest.mark.parametrize("method", ["base", "mei", "fn", "entame", "keep"])
def test_twice_is_once(method):
    config = EntameConfig.for_method(method)
    model = apply_entame(timm.create_model("test_resnet", num_classes=10), config)
    once = copy.deepcopy(model.state_dict())
    apply_entame(model, config)
    torch.testing.assert_close(model.state_dict(), once, rtol=0, atol=0)
    apply_entame(model, config, num_labels=10)
    torch.testing.assert_close(model.state_dict(), once, rtol=0, atol=0)


def test_another_configuration_is_applied_anew():
    model = apply_entame(timm.create_model("test_resnet", num_classes=10))
    apply_entame(model, EntameConfig.for_method("base"))
    assert type(model.fc) is nn.Linear
    assert model.fc.weight.std() > 0.1
    apply_entame(model, EntameConfig(eps=1e-3))
    assert model.fc.znorm.eps == 1e-3
    assert model.fc.weight.std() < 1e-5


def test_the_same_generator_seed_gives_the_same_head():
    def head(seed):
        model = timm.create_model("test_resnet", num_classes=10)
        return apply_entame(model, generator=torch.Generator().manual_seed(seed)).fc.weight

    assert torch.equal(head(3), head(3))
    assert not torch.equal(head(3), head(4))


def test_folding_keeps_the_logits(classifier):
    build, side, path = classifier
    model = build(10).double()
    stock_keys = set(model.state_dict())
    apply_entame(model, EntameConfig(phi_w=0.05)).train()
    logits_of(model, images(side, 16, seed=2).double())
    model.eval()
    with torch.no_grad():
        before = logits_of(model, images(side).double())
        after = logits_of(fold_entame(model), images(side).double())
    # Untrained deep networks have logits far from 1: their size is the unit.
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9 * float(before.abs().max()))
    assert type(model.get_submodule(path)) in (nn.Linear, nn.Conv2d)
    assert set(model.state_dict()) == stock_keys


def test_folded_parameters_are_exact_in_float64():
    torch.manual_seed(0)
    weight, bias = torch.randn(5, 7).double(), torch.randn(5).double()
    mean, var, x = torch.randn(7), torch.rand(7), torch.randn(3, 7).double()
    expected = ((x - mean) / torch.sqrt(var.double() + 1e-5)) @ weight.T + bias
    folded_weight, folded_bias = folded_parameters(weight, bias, mean, var, 1e-5)
    torch.testing.assert_close(x @ folded_weight.T + folded_bias, expected, rtol=1e-12, atol=1e-12)


def test_folding_a_head_without_bias_gives_it_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    apply_entame(model, EntameConfig(head="0", phi_w=1.0)).train()
    model(3 + torch.randn(20, 6))
    x = torch.randn(5, 6)
    expected = model.eval()(x)
    torch.testing.assert_close(fold_entame(model)(x), expected)
    assert model[0].bias is not None


def test_folding_a_stock_model_does_nothing():
    model = timm.create_model("test_resnet", num_classes=10)
    before = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(fold_entame(model).state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_patched_models_can_be_cloned(clone):
    model = apply_entame(timm.create_model("test_resnet", num_classes=10), EntameConfig(phi_w=0.1)).train()
    model(images(32))
    twin = clone(model).eval()
    torch.testing.assert_close(twin(images(32)), model.eval()(images(32)))


def test_hooks_on_the_leaf_survive():
    model = timm.create_model("test_resnet", num_classes=10)
    seen = []
    model.fc.register_forward_hook(lambda module, inputs, output: seen.append(output))
    apply_entame(model)(images(32))
    assert len(seen) == 1


class TestNumLabels:
    def test_rebuilds_the_heads(self, classifier):
        build, side, path = classifier
        model = apply_entame(build(1000), num_labels=7).eval()
        assert logits_of(model, images(side)).shape == (8, 7)
        assert 1000 not in {size for parameter in find_heads(model)[0].module.parameters() for size in parameter.shape}
        assert vars(model).get("num_classes", 7) == 7
        config = getattr(model, "config", None)
        if config is not None:
            assert config.num_labels == len(config.id2label) == len(config.label2id) == 7

    def test_an_optimizer_that_was_built_before_trains_the_rebuilt_head(self, classifier):
        build, side, _ = classifier
        model = build(4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        logits_of(model, images(side)).sum().backward()
        apply_entame(model, num_labels=7).train()
        before = [head.module.weight.detach().clone() for head in find_heads(model)]
        optimizer.step()
        assert all(torch.equal(head.module.weight, b) for head, b in zip(find_heads(model), before, strict=True))
        logits = logits_of(model, images(side))
        torch.nn.functional.cross_entropy(logits, torch.arange(len(logits)) % 7).backward()
        optimizer.step()
        assert not torch.equal(find_heads(model)[0].module.weight, before[0])

    def test_keeps_dtype(self):
        model = apply_entame(timm.create_model("test_resnet").bfloat16(), num_labels=7)
        assert model.fc.weight.dtype == model.fc.bias.dtype == torch.bfloat16

    def test_keep_draws_a_rebuilt_head_as_transformers_does(self):
        config = EntameConfig.for_method("keep")
        model = apply_entame(timm.create_model("test_resnet"), config, num_labels=200)
        assert model.fc.weight.std().item() == pytest.approx(0.02, rel=0.05)

    def test_regression_is_refused(self):
        model = timm.create_model("test_resnet", num_classes=10)
        with pytest.raises(ValueError, match="regression"):
            apply_entame(model, num_labels=1)
        assert model.fc.weight.shape[0] == 10

    @pytest.mark.parametrize("method", ["entame", "keep"])
    @pytest.mark.parametrize("num_labels", [None, 3])
    def test_regression_of_several_numbers_is_refused(self, tiny_vit, method, num_labels):
        tiny_vit.config.problem_type = "regression"
        with pytest.raises(InputError, match=r'problem_type = "single_label_classification"'):
            apply_entame(tiny_vit, EntameConfig.for_method(method), num_labels=num_labels)
        tiny_vit.config.problem_type = "multi_label_classification"
        apply_entame(tiny_vit, EntameConfig.for_method(method), num_labels=num_labels)


class TestKeepOverNormalisedFeatures:
    """A head that is kept trains further from where it was."""

    def test_evaluation_is_unchanged_before_training(self):
        model = timm.create_model("test_resnet", num_classes=10).eval()
        expected = model(images(32))
        apply_entame(model, EntameConfig(init="keep"))
        torch.testing.assert_close(model(images(32)), expected, rtol=1e-4, atol=1e-5)

    def test_the_first_training_step_gives_the_stock_logits(self):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=10, img_size=32).train()
        expected = model(images(32))
        apply_entame(model, EntameConfig(init="keep"))
        torch.testing.assert_close(model(images(32)), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.eval()(images(32)), expected, rtol=1e-4, atol=1e-5)

    def test_a_normalised_head_keeps_its_statistics(self):
        model = apply_entame(timm.create_model("test_resnet", num_classes=10), EntameConfig(phi_w=0.1)).train()
        model(images(32))
        expected = model.eval()(images(32))
        apply_entame(model, EntameConfig(init="keep"))
        torch.testing.assert_close(model(images(32)), expected)
        apply_entame(model, EntameConfig.for_method("keep"))
        assert type(model.fc) is nn.Linear
        torch.testing.assert_close(model(images(32)), expected, rtol=1e-4, atol=1e-5)

    def test_without_a_bias_it_is_refused(self):
        model = nn.Sequential(nn.Linear(6, 4, bias=False))
        with pytest.raises(ValueError, match="feature_norm=False"):
            apply_entame(model, EntameConfig(init="keep", head="0"))


def test_a_layer_with_a_forward_of_its_own_is_refused():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(6, 4))
    with pytest.raises(ValueError, match="Scaled"):
        apply_entame(model, EntameConfig(head="0"))
    apply_entame(model, EntameConfig(head="0", feature_norm=False))


@pytest.mark.parametrize("number", [0, -3, 2.5, "10", float("nan")])
def test_what_is_no_number_of_classes_is_refused(tiny_vit, number):
    with pytest.raises(InputError, match="is no number of classes: use two or more"):
        apply_entame(tiny_vit, num_labels=number)


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = timm.create_model("test_resnet", num_classes=10)
    with pytest.raises(ValueError, match="meta"):
        apply_entame(model)


def test_loading_a_trained_head_replaces_a_kept_one():
    trained = apply_entame(timm.create_model("test_resnet", num_classes=10), EntameConfig(phi_w=0.1)).train()
    trained(images(32))
    other = apply_entame(timm.create_model("test_resnet", num_classes=10), EntameConfig(init="keep"))
    other.load_state_dict(trained.state_dict())
    other.train()(images(32))
    assert torch.equal(other.fc.weight, trained.fc.weight)
