import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from entame_hf import InputError, ZNormConv2d, ZNormLinear, z_norm
from entame_hf.layers import ZNorm
from entame_hf.layers.statistics import batch_statistics


def reference(x, eps=1e-5, dim=-1):
    """z-normalisation in float64, written down as the paper does."""
    x = x.double().movedim(dim, -1)
    rows = x.reshape(-1, x.shape[-1])
    mean = rows.mean(0)
    var = ((rows - mean) ** 2).mean(0)
    return ((x - mean) / torch.sqrt(var + eps)).movedim(-1, dim)


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((64, 33), -1), ((2, 7), -1), ((8, 5, 16), -1), ((6, 12, 3, 4), -3)],
    ids=["rows", "two-rows", "tokens", "maps"],
)
@pytest.mark.parametrize(("centre", "spread"), [(0, 1), (300, 400), (1000, 0.01), (0, 1e-4)], ids=str)
def test_z_norm_against_float64(shape, dim, centre, spread):
    torch.manual_seed(0)
    x = centre + spread * torch.randn(shape)
    torch.testing.assert_close(z_norm(x, dim=dim).double(), reference(x, dim=dim), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [ZNorm(33), ZNorm(33, dim=-3)], ids=["linear", "conv"])
def test_training_forward_and_gradient_against_float64(layer):
    torch.manual_seed(0)
    shape = (16, 33) if layer.dim == -1 else (4, 33, 3, 3)
    x = (3 + 2 * torch.randn(shape)).requires_grad_()
    upstream = torch.randn(shape)
    y = layer.train()(x)
    y.backward(upstream)
    exact = x.detach().double().requires_grad_()
    expected = reference(exact, dim=layer.dim)
    expected.backward(upstream.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_fp16_features_in_the_hundreds():
    torch.manual_seed(0)
    x = (400 * torch.randn(256, 64)).half()
    y = ZNorm(64).train()(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), reference(x), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [0.0, 300.1, -7e4], ids=str)
def test_constant_feature_becomes_zero(dtype, value):
    x = torch.randn(37, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, 2] = max(value, -6e4) if dtype == torch.float16 else value
    layer = ZNorm(4).train()
    assert torch.equal(layer(x)[:, 2], torch.zeros(37, dtype=dtype))
    assert layer.var[2] == 0
    assert torch.equal(layer.eval()(x)[:, 2], torch.zeros(37, dtype=dtype))


def test_channels_last_gives_the_same():
    torch.manual_seed(0)
    x = 5 + torch.randn(4, 12, 6, 6)
    torch.testing.assert_close(z_norm(x.to(memory_format=torch.channels_last), dim=1), z_norm(x, dim=1))


def test_bf16_autocast_computes_statistics_in_float32():
    torch.manual_seed(0)
    layer = ZNormLinear(32, 10)
    x = 100 + torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert layer.znorm.mean.dtype == torch.float32
    torch.testing.assert_close(layer.znorm.mean, x.mean(0), rtol=1e-6, atol=1e-5)


def test_without_averaging_a_full_batch_replaces_the_statistics_and_a_partial_one_barely_moves_them():
    layer = ZNorm(3).train()
    full, left_over = torch.randn(100, 3), 50 + torch.randn(4, 3)
    layer(full)
    torch.testing.assert_close(layer.mean, full.mean(0))
    torch.testing.assert_close(layer.var, full.var(0, unbiased=False))
    before = layer.mean.clone()
    layer(left_over)
    torch.testing.assert_close(layer.mean, before + (left_over.mean(0) - before) * 4 / 100)


def weighted_mean(batches, momentum):
    """The mean and variance that a layer stores, written down in float64 from the weights of all batches."""
    weights, largest = [], 0
    for batch in batches:
        largest = max(largest, len(batch))
        weight = momentum * len(batch) / max(largest, 1)
        weights = [earlier * (1 - weight) for earlier in weights] + [weight]
    counted = [(weight / sum(weights), batch) for weight, batch in zip(weights, batches, strict=True) if weight]
    mean = sum(weight * batch.mean(0) for weight, batch in counted)
    return mean, sum(weight * batch.var(0, correction=0) for weight, batch in counted)


@pytest.mark.parametrize("sizes", [[50], [50] * 7, [8, 50, 50, 3, 50, 1, 0, 20]], ids=["one", "equal", "ragged"])
@pytest.mark.parametrize("momentum", [1e-4, 0.1, 0.9])
def test_stored_statistics_are_the_weighted_mean_of_all_batches(sizes, momentum):
    torch.manual_seed(0)
    layer = ZNorm(3, momentum=momentum).double().train()
    batches = [4 + 3 * torch.rand(()) + torch.randn(size, 3).double() for size in sizes]
    for batch in batches:
        layer(batch)
    # One sample and none have no variance, and leave the statistics alone.
    mean, var = weighted_mean([batch for batch in batches if len(batch) > 1], momentum)
    torch.testing.assert_close(layer.mean, mean)
    torch.testing.assert_close(layer.var, var)


def test_the_first_batch_replaces_the_initial_statistics():
    layer, x = ZNorm(3, momentum=0.1).train(), 4 + torch.randn(50, 3)
    layer(x)
    torch.testing.assert_close(layer.mean, x.mean(0))
    torch.testing.assert_close(layer.var, x.var(0, correction=0))


def test_an_average_continues_after_saving_and_loading():
    torch.manual_seed(0)
    layer, resumed = (ZNormLinear(3, 2, momentum=0.2).double().train() for _ in range(2))
    first, second = torch.randn(2, 20, 3).double()
    layer(first)
    resumed.load_state_dict(layer.state_dict())
    layer(second)
    resumed(second)
    torch.testing.assert_close(resumed.state_dict(), layer.state_dict(), rtol=0, atol=0)


def test_one_sample_uses_the_stored_statistics_and_leaves_them():
    layer = ZNorm(3).train()
    single = torch.tensor([[5.0, -2.0, 0.5]])
    torch.testing.assert_close(layer(single), single / (1 + 1e-5) ** 0.5)
    x = 2 + 3 * torch.randn(64, 3)
    layer(x)
    mean, var = layer.mean.clone(), layer.var.clone()
    torch.testing.assert_close(layer(single), (single - mean) / torch.sqrt(var + 1e-5))
    assert torch.equal(layer.mean, mean)
    assert torch.equal(layer.var, var)


def test_no_sample_is_no_error():
    layer = ZNormLinear(3, 2).train()
    assert layer(torch.empty(0, 3)).shape == (0, 2)
    assert layer.znorm.mean.isfinite().all()


def test_evaluation_does_not_depend_on_the_company():
    torch.manual_seed(0)
    layer = ZNormLinear(8, 4).train()
    layer(torch.randn(32, 8))
    layer.eval()
    x = torch.randn(8, 8)
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_survive_half_precision(dtype):
    layer = ZNormLinear(8, 4).train()
    layer(1000 + torch.randn(64, 8))
    mean = layer.znorm.mean.clone()
    layer.to(dtype)
    assert layer.weight.dtype == dtype
    assert torch.equal(layer.znorm.mean, mean)
    assert layer.double().weight.dtype == torch.float64


def test_is_a_linear_with_the_same_parameter_names():
    layer = ZNormLinear(8, 4)
    assert isinstance(layer, nn.Linear)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert isinstance(ZNormConv2d(8, 4), nn.Conv2d)
    assert ZNormLinear(8, 4, bias=False).bias is None


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)
def test_clones_are_independent_and_equal(clone):
    layer = ZNormLinear(8, 4).train()
    layer(torch.randn(16, 8))
    twin = clone(layer)
    x = torch.randn(16, 8)
    torch.testing.assert_close(twin.eval()(x), layer.eval()(x))
    twin.train()(x + 9)
    assert not torch.equal(twin.znorm.mean, layer.znorm.mean)


def test_a_stock_state_dict_loads_and_gives_the_stock_logits():
    torch.manual_seed(0)
    stock, layer = nn.Linear(8, 4), ZNormLinear(8, 4).train()
    layer(5 + torch.randn(16, 8))
    layer.load_state_dict(stock.state_dict())
    x = torch.randn(16, 8)
    torch.testing.assert_close(layer.eval()(x), stock(x))
    # The first training batch rewrites the weights, over which all later ones are normalised.
    torch.testing.assert_close(layer.train()(x), stock(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.eval()(x), stock(x), rtol=1e-4, atol=1e-5)


def test_loading_other_layers_leaves_the_statistics():
    layer = ZNormLinear(8, 4).train()
    layer(5 + torch.randn(16, 8))
    mean = layer.znorm.mean.clone()
    layer.load_state_dict({}, strict=False)
    assert torch.equal(layer.znorm.mean, mean)


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"eps": -1.0}, {"momentum": 0.0}, {"momentum": 3.0}], ids=str)
def test_values_that_normalise_nothing_are_refused(options):
    with pytest.raises(InputError, match=r"must be positive, and `momentum=.*` in \(0, 1\]"):
        ZNormLinear(8, 4, **options)


@pytest.mark.parametrize("options", [{"kernel_size": 3}, {"kernel_size": 1, "groups": 2}], ids=str)
def test_convolutions_that_do_not_fold_are_refused(options):
    with pytest.raises(InputError, match="do not fold back"):
        ZNormConv2d(8, 4, **options)


def test_mean_without_var_is_refused():
    with pytest.raises(InputError, match="`mean` without `var`"):
        z_norm(torch.randn(4, 3), torch.zeros(3))


def test_compiles_without_graph_breaks():
    torch.manual_seed(0)
    layer = ZNormLinear(8, 4).train()
    twin = copy.deepcopy(layer)
    x = torch.randn(16, 8)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), twin(x))
    torch.testing.assert_close(layer.znorm.var, twin.znorm.var)


class HostReads(TorchDispatchMode):
    """Count the values that the host reads: it would wait for a GPU to know them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def process_group():
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_no_value_of_a_global_batch_is_read_by_the_host(process_group):
    x = torch.randn(6, 4, requires_grad=True)
    with HostReads() as reads:
        batch = batch_statistics(x, -1, sync=True)
        batch.var.sum().backward()
    torch.testing.assert_close(batch.var, x.var(0, correction=0))
    assert reads.count == 0
    with reads:
        x[x.sum(1).argmax()]
    assert reads.count == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_gradient_through_a_global_batch_is_that_of_a_batch(process_group, compiled):
    """Which is written out, and traced without graph breaks."""
    x = torch.randn(6, 4, dtype=torch.float64) * 3 + 100
    weights = torch.randn(2, 4, dtype=torch.float64)
    gradients = []
    for sync in (False, True):
        rows = x.clone().requires_grad_(True)
        function = partial(batch_statistics, dim=-1, sync=sync)
        if sync and compiled:
            function = torch.compile(function, fullgraph=True, backend="aot_eager")
        batch = function(rows)
        (weights * torch.stack([batch.offset, batch.var])).sum().backward()
        gradients.append(rows.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
