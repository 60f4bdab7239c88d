"""ENTAME beside what else is done to a classifier: compiled, checkpointed, scaled, averaged, exported, converted."""

import copy
import math

import onnxruntime
import pytest
import timm
import torch
from conftest import CLASSIFIERS, RandomImages, logits_of
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from entame_hf import EntameTrainer, EntameTrainingArguments, ZNormLinear, apply_entame, find_heads, fold_entame

SLOW = pytest.mark.slow
KINDS = ["timm-resnet", "hf-vit", *(pytest.param(kind, marks=SLOW) for kind in ("timm-vit", "hf-convnext"))]


def adapted(kind, momentum=1.0):
    """A classifier with a head that has learned something, and images for it."""
    torch.manual_seed(0)
    factory, side, path = CLASSIFIERS[kind]
    model = apply_entame(factory(10)).train()
    head = model.get_submodule(path)
    nn.init.normal_(head.weight, std=0.1)
    head.znorm.momentum = momentum
    images = torch.randn(24, 3, side, side)
    with torch.no_grad():
        model(images)
    return model, head, images


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_half_precision_starts_at_maximum_entropy(classifier, dtype):
    factory, side, path = classifier
    model = apply_entame(factory(10).to(dtype), num_labels=7).train()
    head = model.get_submodule(path)
    assert head.weight.dtype == dtype
    assert head.znorm.mean.dtype == torch.float32
    with torch.no_grad():
        logits = logits_of(model, torch.randn(8, 3, side, side, dtype=dtype))
    assert cross_entropy(logits, torch.arange(8) % 7).item() == pytest.approx(math.log(7), abs=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.runs
def test_compiles_whole_and_once_for_every_ragged_batch(kind):
    torch._dynamo.reset()
    model, head, images = adapted(kind)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # One graph for the size that is trained with, one more for all others.
    for count in (24, 24, 7):
        got, expected = logits_of(compiled, images[:count]), logits_of(twin, images[:count])
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        got.sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (5, 13):
            logits_of(compiled, images[:count]).sum().backward()
            logits_of(twin, images[:count])
    statistics = find_heads(twin)[0].module.znorm
    torch.testing.assert_close(head.znorm.mean, statistics.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head.znorm.var, statistics.var, rtol=1e-4, atol=1e-5)


@pytest.mark.runs
def test_a_compiled_training_is_the_eager_one(tmp_path):
    torch._dynamo.reset()
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=10, img_size=32)
        args = EntameTrainingArguments(
            str(tmp_path / str(compiled)),
            max_steps=3,
            per_device_train_batch_size=16,
            torch_compile=compiled,
            torch_compile_backend="aot_eager" if compiled else None,
            report_to="none",
            save_steps=3,
        )
        EntameTrainer(model, args, train_dataset=RandomImages(48)).train()
        weights.append(model.state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'True' / 'checkpoint-3'}", pretrained=True).eval()
    images = RandomImages(8).images
    torch.testing.assert_close(loaded(images), model.eval()(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_recomputing_activations_moves_the_statistics_once(reentrant):
    model, head, images = adapted("timm-resnet", momentum=0.5)
    twin = copy.deepcopy(model)
    images.requires_grad_(True)
    checkpoint(model, images, use_reentrant=reentrant).square().mean().backward()
    twin(images).square().mean().backward()
    torch.testing.assert_close(head.znorm.mean, twin.fc.znorm.mean, rtol=0, atol=0)
    torch.testing.assert_close(head.znorm.var, twin.fc.znorm.var, rtol=0, atol=0)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize("kind", ["timm-vit", "hf-vit"])
def test_a_library_s_own_gradient_checkpointing(kind):
    model, head, images = adapted(kind, momentum=0.5)
    twin = copy.deepcopy(model)
    if kind == "hf-vit":
        model.gradient_checkpointing_enable()
    else:
        model.set_grad_checkpointing()
    for each in (model, twin):
        logits_of(each, images).square().mean().backward()
    torch.testing.assert_close(head.znorm.mean, find_heads(twin)[0].module.znorm.mean)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_with_scaled_gradients(dtype):
    model, head, images = adapted("timm-resnet")
    labels = torch.arange(24) % 10
    cross_entropy(model(images), labels).backward()
    exact = head.weight.grad.clone()
    model.zero_grad()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=128.0)
    with torch.autocast("cpu", dtype):
        loss = cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.testing.assert_close(head.weight.grad, exact, rtol=0.1, atol=5e-2 * float(exact.abs().max()))
    before = head.weight.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(head.weight, before)
    assert head.znorm.mean.dtype == torch.float32


def test_an_average_of_weights_averages_the_statistics():
    model, head, images = adapted("timm-resnet")
    ema = ModelEmaV3(model, decay=0.75)
    start = head.znorm.mean.clone()
    with torch.no_grad():
        model(images * 2)
    ema.update(model)
    torch.testing.assert_close(ema.module.fc.znorm.mean, start.lerp(head.znorm.mean, 0.25))
    logits = ema.module.eval()(images)
    torch.testing.assert_close(fold_entame(copy.deepcopy(ema.module))(images), logits, rtol=1e-4, atol=1e-4)
    ModelEmaV3(model, decay=0.0).update(model)
    torch.testing.assert_close(model.eval()(images), ModelEmaV3(model).module.eval()(images), rtol=0, atol=0)


class Logits(nn.Module):
    """What an exported model computes."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return logits_of(self.model, images)


@pytest.mark.parametrize("folds", [True, False], ids=["folded", "normalising"])
@pytest.mark.parametrize("kind", KINDS)
def test_exports_for_any_batch(kind, folds):
    model, _, images = adapted(kind)
    model.eval()
    expected = logits_of(model, images).detach()
    model = Logits(fold_entame(model) if folds else model)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images[:4],), dynamic_shapes={"images": {0: batch}}).module()
    for count in (1, 8):
        torch.testing.assert_close(program(images[:count]), expected[:count], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.runs
def test_onnx_gives_the_same_logits(tmp_path, kind):
    model, _, images = adapted(kind)
    model.eval()
    expected = logits_of(model, images).detach().numpy()
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(
        Logits(fold_entame(model)),
        (images[:4],),
        file,
        dynamo=True,
        dynamic_shapes={"images": {0: "batch"}},
        input_names=["images"],
        verbose=False,
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for count in (1, 8):
        (logits,) = session.run(None, {"images": images[:count].numpy()})
        torch.testing.assert_close(torch.tensor(logits), torch.tensor(expected[:count]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["timm-resnet", "hf-resnet"])
def test_converting_the_rest_of_the_model_to_sync_batchnorm(kind):
    model, head, images = adapted(kind)
    expected = logits_of(model.eval(), images)
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert any(isinstance(module, nn.SyncBatchNorm) for module in converted.modules())
    assert find_heads(converted)[0].module is head
    assert isinstance(head, ZNormLinear)
    torch.testing.assert_close(logits_of(converted, images), expected, rtol=0, atol=0)
    assert type(find_heads(fold_entame(converted))[0].module) is nn.Linear
