"""An adapter's checkpoint does not hold the running statistics of the backbone: they stay, or it is refused."""

import pytest
import torch
from conftest import RandomImages
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError, apply_entame, fold_entame

DATA = RandomImages(48)


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    ResNetForImageClassification(ResNetConfig(num_labels=10, **sizes)).save_pretrained(tmp_path / "base")
    return lambda: AutoModelForImageClassification.from_pretrained(tmp_path / "base")


def adapted(model, *saved):
    lora = LoraConfig(target_modules=["convolution"], modules_to_save=["classifier", *saved], r=2)
    return get_peft_model(model, lora)


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]


@torch.no_grad()
def logits(model):
    return model.eval()(DATA.images).logits


def learn(model, freezes=False):
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(4):
        model.train()
        for norm in batch_norms(model):
            norm.train(not freezes)
        optimizer.zero_grad()
        cross_entropy(model(DATA.images).logits, DATA.labels).backward()
        optimizer.step()
    return logits(model)


def trainer_of(model, folder, **options):
    args = EntameTrainingArguments(str(folder), max_steps=4, learning_rate=1e-2, disable_tqdm=True, **options)
    return EntameTrainer(model, args, train_dataset=DATA)


@pytest.mark.parametrize("options", [{}, {"freeze_statistics": True}, {"freeze_backbone": True}], ids=str)
def test_a_loaded_adapter_gives_the_logits_that_were_evaluated(tmp_path, base, options):
    model = adapted(base())
    trainer = trainer_of(model, tmp_path / "out", **options)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


def test_statistics_that_would_move_are_refused_before_a_training(tmp_path, base):
    with pytest.raises(InputError, match=r"`freeze_statistics=False` moves the running statistics of `.*adapter"):
        trainer_of(adapted(base()), tmp_path, freeze_statistics=False).train()


def test_statistics_that_the_adapter_holds_may_move(tmp_path, base):
    model = adapted(base(), "normalization")
    before = [norm.running_mean.clone() for norm in batch_norms(model)]
    trainer_of(model, tmp_path / "out", freeze_statistics=False).train()
    assert any(not torch.equal(norm.running_mean, b) for norm, b in zip(batch_norms(model), before, strict=True))
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", [[adapted, apply_entame], [apply_entame, adapted]], ids=["peft first", "peft last"])
def test_an_own_loop_that_moved_them_is_told_to_merge(tmp_path, base, order):
    model = order[1](order[0](base()))
    model.save_pretrained(tmp_path / "untrained")
    expected = learn(model)
    with pytest.raises(InputError, match=r"running statistics of `.*` have moved in training"):
        model.save_pretrained(tmp_path / "adapter")
    fold_entame(model).merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForImageClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("order", [[adapted, apply_entame], [apply_entame, adapted]], ids=["peft first", "peft last"])
def test_an_own_loop_that_left_them_alone_saves_its_adapter(tmp_path, base, order):
    model = order[1](order[0](base()))
    expected = learn(model, freezes=True)
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, True), ({"freeze_statistics": True}, False), ({"freeze_backbone": True}, False)],
    ids=str,
)
def test_a_backbone_that_is_frozen_by_hand_is_said_to_move(tmp_path, base, caplog, options, said):
    model = base()
    model.resnet.requires_grad_(False)
    before = batch_norms(model)[0].running_mean.clone()
    trainer_of(model, tmp_path, save_strategy="no", **options).train()
    assert ("BatchNorm layers are frozen, and their running statistics still move" in caplog.text) == said
    assert torch.equal(batch_norms(model)[0].running_mean, before) == (not said)
