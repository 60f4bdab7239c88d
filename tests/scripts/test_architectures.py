"""Every classifier of timm and transformers is patched whole or refused with a reason."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
import timm
import torch
import transformers
from conftest import logits_of
from torch import nn
from torch.nn.functional import cross_entropy

from entame_hf import EntameConfig, apply_entame, find_heads, fold_entame
from entame_hf.heads import num_classes

pytestmark = pytest.mark.reproduction

SCRIPT = Path(__file__).parents[2] / "scripts" / "architectures.py"
spec = importlib.util.spec_from_file_location("architectures", SCRIPT)
architectures = importlib.util.module_from_spec(spec)
sys.modules["architectures"] = architectures
spec.loader.exec_module(architectures)

ENCODERS = [name for name in timm.list_models() if name.endswith("_enc")]
SAMPLE = random.Random(0).sample(sorted(set(timm.list_models()) - set(ENCODERS)), 60)


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_timm():
    for finding in architectures.timm_models(SAMPLE):
        assert not finding.wrong, finding
        assert not finding.outcome.startswith("refused"), finding


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_of_timm():
    refused = []
    for finding in architectures.timm_models():
        assert not finding.wrong, finding
        refused += [finding.name] if finding.outcome.startswith("refused") else []
    assert refused == ENCODERS


@pytest.mark.parametrize("name", architectures.transformers_classes())
def test_all_of_transformers(name):
    (finding,) = architectures.transformers_models([name])
    if finding.outcome.startswith("not built"):
        pytest.skip(finding.outcome)
    assert not finding.wrong, finding
    # It answers yes or no with the token probabilities of a language model.
    assert finding.outcome.startswith("refused") == (name == "ShieldGemma2ForImageClassification")


def timm_kind(name, side, **kwargs):
    def build():
        if name not in timm.list_models():
            pytest.skip(f"timm {timm.__version__} has no {name}")
        return timm.create_model(name, num_classes=1000, **kwargs), side

    return build


def transformers_kind(name, side, **kwargs):
    kind = getattr(transformers, name)
    return lambda: (kind(kind.config_class(num_labels=1000, image_size=side, **kwargs)), side)


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "patch_size": 8}
# name: (factory, number of heads)
ODD = {
    "two-averaged-deit": (timm_kind("deit_tiny_distilled_patch16_224", 32, img_size=32), 2),
    "two-averaged-pit": (timm_kind("pit_ti_distilled_224", 224), 2),
    "two-averaged-levit-after-batchnorm": (timm_kind("levit_128s", 224), 2),
    "two-averaged-repvit-after-batchnorm": (timm_kind("repvit_m0_9", 64), 2),
    "two-averaged-swiftformer": (timm_kind("swiftformer_xs", 64), 2),
    "two-averaged-efficientformer": (timm_kind("efficientformer_l1", 224), 2),
    "two-averaged-crossvit": (timm_kind("crossvit_9_240", 240), 2),
    "class-and-token-volo": (timm_kind("volo_d1_224", 64, img_size=64), 2),
    "four-efficientvim": (timm_kind("efficientvim_m1", 224), 4),
    "convolution-dla": (timm_kind("dla46_c", 64), 1),
    "convolution-dpn": (timm_kind("dpn48b", 64), 1),
    "convolution-resnetv2": (timm_kind("resnetv2_18", 64), 1),
    "mlp-convnext": (timm_kind("convnext_atto", 64, head_hidden_size=64), 1),
    "attention-pool": (timm_kind("test_vit3", 160), 1),
    "no-bias-imagegpt": (
        transformers_kind("ImageGPTForImageClassification", 8, n_embd=32, n_layer=1, n_head=2, n_positions=64),
        1,
    ),
    "decoy-hgnet": (
        transformers_kind(
            "HGNetV2ForImageClassification",
            64,
            stem_channels=[3, 8, 8],
            stage_in_channels=[8, 16],
            stage_mid_channels=[8, 8],
            stage_out_channels=[16, 32],
            stage_num_blocks=[1, 1],
            stage_numb_of_layers=[1, 1],
            stage_downsample=[False, True],
            stage_light_block=[False, False],
            stage_kernel_size=[3, 3],
            depths=[1, 1],
            hidden_sizes=[16, 32],
        ),
        1,
    ),
    "decoy-textnet": (
        transformers_kind(
            "TextNetForImageClassification",
            64,
            stem_out_channels=8,
            hidden_sizes=[8, 16, 16, 16, 32],
            conv_layer_kernel_sizes=[[[3, 3]], [[3, 3]], [[3, 3]], [[3, 3]]],
            conv_layer_strides=[[2], [2], [2], [2]],
        ),
        1,
    ),
    "teacher-levit": (transformers_kind("LevitForImageClassificationWithTeacher", 224), 2),
    "teacher-deit": (transformers_kind("DeiTForImageClassificationWithTeacher", 32, **TINY), 2),
}


def images_for(model, side, count=8):
    if isinstance(model, transformers.ImageGPTForImageClassification):
        return torch.randint(512, (count, side * side), generator=torch.Generator().manual_seed(1))
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(1))


def assert_classes(model, leaves, classes):
    """Everybody who counts a model's classes counts the same."""
    assert {num_classes(leaf) for leaf in leaves} == {classes}
    if isinstance(model, transformers.PreTrainedModel):
        assert model.config.num_labels == classes
        assert sorted(model.config.id2label) == sorted(model.config.label2id.values()) == list(range(classes))
    else:
        assert model.num_classes == classes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "heads"), ODD.values(), ids=ODD)
def test_odd_kinds(build, heads):
    torch.manual_seed(0)
    model, side = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="regression"):
        apply_entame(model, num_labels=1)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    leaves = [head.module for head in find_heads(apply_entame(model, num_labels=1000))]
    assert len(leaves) == heads
    assert_classes(model, leaves, 1000)
    apply_entame(model, num_labels=7).train()
    assert leaves == [head.module for head in find_heads(model)]
    assert_classes(model, leaves, 7)
    assert not any(1000 in parameter.shape for leaf in leaves for parameter in leaf.parameters())

    images, labels = images_for(model, side), torch.arange(8) % 7
    logits = logits_of(model, images)
    # In training, distilled heads come side by side.
    outputs = logits if isinstance(logits, tuple) else (logits,)
    for output in outputs:
        assert cross_entropy(output, labels).item() == pytest.approx(math.log(7), abs=1e-3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert cross_entropy(logits_of(model.eval(), images), labels).item() == pytest.approx(math.log(7), abs=1e-2)
    before = [leaf.weight.detach().clone() for leaf in leaves]
    sum(cross_entropy(output, labels) for output in outputs).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert all(not torch.equal(leaf.weight, old) for leaf, old in zip(leaves, before, strict=True))

    model.eval()
    with torch.no_grad():
        together = logits_of(model, images)
        unit = max(1.0, float(together.abs().max()))
        torch.testing.assert_close(logits_of(model, images[:1]), together[:1], rtol=1e-5, atol=1e-5 * unit)
        copies = logits_of(model, images[:1].expand(8, *images.shape[1:]))
        torch.testing.assert_close(copies, together[:1].expand(8, -1), rtol=1e-5, atol=1e-5 * unit)
        torch.testing.assert_close(logits_of(fold_entame(model), images), together, rtol=1e-5, atol=1e-5 * unit)
    assert all(type(leaf) in (nn.Linear, nn.Conv2d) for leaf in leaves)


@pytest.mark.filterwarnings("ignore")
def test_auxiliary_logits_are_a_head_too():
    model = apply_entame(timm.create_model("inception_v3", aux_logits=True), EntameConfig(), num_labels=7).train()
    assert [head.path for head in find_heads(model)] == ["fc", "AuxLogits.fc"]
    for output in model(torch.randn(4, 3, 299, 299)):
        assert cross_entropy(output, torch.arange(4)).item() == pytest.approx(math.log(7), abs=1e-3)
