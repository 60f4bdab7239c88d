"""A model that is sharded over processes is treated, and folded, as a whole one is."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import ViTConfig, ViTForImageClassification

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import TINY_VIT

from entame_hf import EntameConfig, apply_entame, fit_head, fold_entame

# Large enough that a fold which does nothing shows.
CONFIG = EntameConfig(phi_w=0.1)
INFORMED = EntameConfig.for_method("informed")
IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **TINY_VIT)
    return ViTForImageClassification(config)


def treated(model: nn.Module) -> nn.Module:
    return apply_entame(model, CONFIG, generator=torch.Generator().manual_seed(dist.get_rank()))


def set_statistics(model: nn.Module) -> None:
    znorm = model.classifier.znorm
    znorm.mean.copy_(torch.linspace(-2, 2, znorm.num_features))
    znorm.var.copy_(torch.linspace(0.5, 4, znorm.num_features))


@torch.no_grad()
def expected() -> tuple[Tensor, Tensor, Tensor]:
    """One process's head, its folded one, and its logits."""
    torch.manual_seed(0)
    model = apply_entame(vit(), CONFIG, generator=torch.Generator().manual_seed(0)).eval()
    set_statistics(model)
    head, logits = model.classifier.weight.clone(), model(IMAGES).logits
    return head, fold_entame(model).classifier.weight, logits


@torch.no_grad()
def check_fold(model: nn.Module, forward: Callable[[Tensor], Tensor], gathered: Callable[[], Tensor]) -> None:
    head, folded, logits = expected()
    torch.testing.assert_close(gathered(), head, rtol=0, atol=0)
    with pytest.raises(ValueError, match="sharded over processes"):
        model.save_pretrained("nowhere")
    model.eval()
    set_statistics(model)
    torch.testing.assert_close(forward(IMAGES), logits)
    # FSDP2 leaves the parameters together after a forward.
    fold_entame(model)
    assert not hasattr(model.classifier, "znorm")
    torch.testing.assert_close(gathered(), folded, rtol=0, atol=0)
    torch.testing.assert_close(forward(IMAGES), logits, rtol=1e-4, atol=1e-5)


def fsdp2(alone: bool) -> None:
    model, mesh = treated(vit()), init_device_mesh("cpu", (dist.get_world_size(),))
    # Each process has drawn a head of its own here, and sharding would take a part of each.
    dist.broadcast(model.classifier.weight.data, 0)
    if alone:
        fully_shard(model.classifier, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def gathered() -> Tensor:
        assert isinstance(model.classifier.weight, DTensor)
        return model.classifier.weight.full_tensor()

    check_fold(model, lambda images: model(images).logits, gathered)
    with pytest.raises(ValueError, match="sharded already"):
        apply_entame(model)
    informed = apply_entame(vit(), INFORMED)
    fully_shard(informed, mesh=mesh)
    with pytest.raises(ValueError, match="sharded already"):
        fit_head(informed, [(IMAGES, torch.arange(8))])
    assert isinstance(model.classifier, nn.Linear)
    # The same parameters train on.
    model.train()(IMAGES).logits.sum().backward()


def zero3() -> None:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 8,
        # Parameters of tiny models would stay whole.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    whole = vit().state_dict()
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = vit()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.copy_(whole[name])
    with pytest.raises(ValueError, match="sharded by DeepSpeed"):
        apply_entame(model, num_labels=3)
    with pytest.raises(ValueError, match="sharded by DeepSpeed"):
        apply_entame(model, EntameConfig(init="keep"))
    with pytest.raises(ValueError, match="sharded already"):
        fit_head(apply_entame(model, INFORMED), [(IMAGES, torch.arange(8))])
    treated(model)
    engine, *_ = deepspeed.initialize(model=model, config=settings)

    def gathered() -> Tensor:
        assert model.classifier.weight.numel() == 0
        with deepspeed.zero.GatheredParameters(list(model.classifier.parameters())):
            return model.classifier.weight.detach().clone()

    check_fold(model, lambda images: engine(images).logits, gathered)


def main(how: str) -> None:
    if how == "zero3":
        zero3()
    else:
        fsdp2(alone=False)
        fsdp2(alone=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
