"""Adapters: the head that peft trains is found, started, saved folded and resumed."""

import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import timm
import torch
from conftest import TINY_VIT, RandomImages
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from entame_hf import (
    EntameConfig,
    EntameTrainer,
    EntameTrainingArguments,
    InputError,
    apply_entame,
    find_heads,
    fold_entame,
)
from entame_hf.patch import as_transformers

DATA = RandomImages(48)
LORA = {"target_modules": ["q_proj", "v_proj"], "r": 4}


def vit(folder=None):
    if folder is not None:
        return ViTForImageClassification.from_pretrained(folder)
    torch.manual_seed(0)
    return ViTForImageClassification(ViTConfig(num_labels=10, **TINY_VIT))


def with_adapters(base, **lora):
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(**{**LORA, "modules_to_save": ["classifier"], **lora}))


def arguments(folder, **changes):
    defaults = {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2, "report_to": "none", "disable_tqdm": True}
    return EntameTrainingArguments(str(folder), per_device_train_batch_size=16, **{**defaults, **changes})


@torch.no_grad()
def logits(model):
    return model.eval()(DATA.images).logits


@pytest.mark.parametrize(
    ("build", "lora", "path"),
    [
        (vit, {**LORA, "modules_to_save": ["classifier"]}, "classifier.modules_to_save.default"),
        (vit, {"target_modules": ["q_proj", "classifier"]}, "classifier.base_layer"),
        (
            lambda: as_transformers(timm.create_model("test_convnext", num_classes=10)),
            {"target_modules": ["fc1"], "modules_to_save": ["head"]},
            "timm_model.head.modules_to_save.default.fc",
        ),
        (
            lambda: as_transformers(timm.create_model("test_convnext", num_classes=10)),
            {"target_modules": ["fc1", "head.fc"]},
            "timm_model.head.fc.base_layer",
        ),
    ],
    ids=["copied", "adapted", "copied-container", "adapted-in-container"],
)
def test_the_head_behind_an_adapter_is_found(build, lora, path):
    model = get_peft_model(build(), LoraConfig(**lora))
    (head,) = find_heads(model)
    assert head.path == f"base_model.model.{path}"
    assert head.module is model.get_submodule(head.path)
    stock = path.replace(".modules_to_save.default", "").replace(".base_layer", "")
    for asked in (stock, head.path):
        assert find_heads(model, asked) == [head]


@pytest.mark.parametrize("first", ["adapters", "entame"])
@pytest.mark.runs
def test_an_adapter_carries_its_folded_head_to_a_process_without_this_package(tmp_path, first):
    base = vit()
    base.save_pretrained(tmp_path / "base")
    model = with_adapters(base if first == "adapters" else apply_entame(base))
    trainer = EntameTrainer(model, arguments(tmp_path / "out"), train_dataset=DATA)
    trainer.train()
    expected = logits(model)
    assert cross_entropy(expected, DATA.labels) < 2.25
    trainer.save_model(str(tmp_path / "final"))
    model.save_pretrained(tmp_path / "by-peft")
    assert torch.equal(logits(model), expected)
    torch.save((DATA.images, expected), tmp_path / "expected.pt")
    script = """
        import sys
        sys.modules["entame_hf"] = None
        import torch
        from peft import PeftModel
        from transformers import AutoModelForImageClassification
        images, expected = torch.load("expected.pt")
        for folder in ("out/checkpoint-4", "final", "by-peft"):
            base = AutoModelForImageClassification.from_pretrained("base")
            model = PeftModel.from_pretrained(base, folder).eval()
            with torch.no_grad():
                torch.testing.assert_close(model(images).logits, expected, rtol=0, atol=1e-4)
    """
    command = [sys.executable, "-I", "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    vit().save_pretrained(tmp_path / "base")
    whole = with_adapters(vit(tmp_path / "base"))
    EntameTrainer(whole, arguments(tmp_path / "out"), train_dataset=DATA).train()
    resumed = with_adapters(vit(tmp_path / "base"))
    trainer = EntameTrainer(resumed, arguments(tmp_path / "out"), train_dataset=DATA)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_the_best_adapter_comes_back_with_its_statistics(tmp_path):
    model = with_adapters(vit())
    # At this rate the loss soon explodes: the best checkpoint is not the last.
    options = {"learning_rate": 0.3, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(tmp_path, load_best_model_at_end=True, **options)
    trainer = EntameTrainer(model, args, train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)


@pytest.mark.runs
def test_the_card_of_an_adapter_is_the_best_one_s_and_keeps_what_people_wrote(tmp_path):
    vit().save_pretrained(tmp_path / "base")
    options = {"learning_rate": 0.3, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 2}
    args = arguments(tmp_path / "out", load_best_model_at_end=True, **options)
    trainer = EntameTrainer(with_adapters(vit(tmp_path / "base")), args, train_dataset=DATA, eval_dataset=DATA)
    trainer.train()
    trainer.save_model()
    file = tmp_path / "out" / "README.md"
    assert not file.exists()  # peft's has nothing but blanks.
    trainer.create_model_card()
    file.write_text(file.read_text() + "\nMy own words.\n")
    trainer.save_model()
    trainer.create_model_card()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert f"| loss | {min(losses):.4g} |" in file.read_text()
    assert file.read_text().endswith("\nMy own words.\n")
    assert file.read_text().count("## Citation") == 1
    assert str(tmp_path) not in file.read_text()
    trainer.create_model_card(finetuned_from="someone/vit")
    data = ModelCard.load(file).data
    assert (data.library_name, data.base_model, data.base_model_relation) == ("peft", "someone/vit", "adapter")
    # In a process without this package, as it stands.
    shutil.copytree(tmp_path / "base", tmp_path / "out" / "someone" / "vit")
    (snippet,) = re.findall(r"```python\n(.*?)```", file.read_text(), re.DOTALL)
    torch.save((DATA.images, logits(trainer.model)), tmp_path / "out" / "expected.pt")
    check = """
        import torch
        images, expected = torch.load("expected.pt")
        with torch.no_grad():
            torch.testing.assert_close(model(images).logits, expected, rtol=0, atol=1e-4)
    """
    command = [sys.executable, "-I", "-c", snippet + textwrap.dedent(check)]
    result = subprocess.run(command, cwd=tmp_path / "out", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_merging_gives_the_stock_model(tmp_path):
    model = with_adapters(vit())
    EntameTrainer(model, arguments(tmp_path / "out", save_strategy="no"), train_dataset=DATA).train()
    expected = logits(model)
    fold_entame(model.merge_and_unload()).save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(vit(tmp_path / "merged")), expected, rtol=0, atol=1e-4)


def learn(model, steps=4):
    """The user's own loop."""
    optimizer, losses = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(cross_entropy(model.train()(DATA.images).logits, DATA.labels))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    return logits(model)


def loaded(folder, base):
    return logits(PeftModel.from_pretrained(vit(base), folder))


class TestOwnLoop:
    """Adapters around a model that ENTAME was applied to, without a trainer."""

    @pytest.fixture(autouse=True)
    def any_peft(self, monkeypatch):
        """transformers asks for a newer peft than what is tested here needs."""
        monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18")

    @pytest.mark.parametrize("method", ["mei", "fn", "entame"])
    def test_an_adapter_that_trains_the_head_saves_it_folded(self, tmp_path, method):
        vit().save_pretrained(tmp_path / "base")
        model = with_adapters(apply_entame(vit(tmp_path / "base"), EntameConfig.for_method(method)))
        expected = learn(model)
        before = model.state_dict()
        model.save_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        torch.testing.assert_close(loaded(tmp_path / "adapter", tmp_path / "base"), expected, rtol=0, atol=1e-4)

    @pytest.mark.runs
    def test_an_adapter_of_a_compiled_model_saves_it_folded(self, tmp_path):
        vit().save_pretrained(tmp_path / "base")
        model = with_adapters(apply_entame(vit(tmp_path / "base")))
        expected = learn(torch.compile(model, backend="eager"))
        torch.compile(model, backend="eager").save_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(loaded(tmp_path / "adapter", tmp_path / "base"), expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("method", ["mei", "entame"])
    @pytest.mark.parametrize("first", ["adapters", "entame"])
    def test_an_adapter_added_by_transformers_saves_it_folded(self, tmp_path, method, first):
        vit().save_pretrained(tmp_path / "base")
        model, config = vit(tmp_path / "base"), EntameConfig.for_method(method)
        if first == "entame":
            apply_entame(model, config)
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(**LORA, modules_to_save=["classifier"]))
        if first == "adapters":
            apply_entame(model, config)
        expected = learn(model)
        model.save_pretrained(tmp_path / "adapter")
        again = vit(tmp_path / "base")
        again.load_adapter(str(tmp_path / "adapter"))
        torch.testing.assert_close(logits(again), expected, rtol=0, atol=1e-4)

    def test_an_adapter_of_a_wrapped_timm_model_saves_it_folded(self, tmp_path):
        torch.manual_seed(0)
        model = as_transformers(timm.create_model("test_convnext", num_classes=10))
        model.save_pretrained(tmp_path / "base")
        base = AutoModelForImageClassification.from_pretrained(tmp_path / "base")
        model = get_peft_model(apply_entame(base), LoraConfig(target_modules=["fc1"], modules_to_save=["head"]))
        expected = learn(model)
        model.save_pretrained(tmp_path / "adapter")
        base = AutoModelForImageClassification.from_pretrained(tmp_path / "base")
        again = logits(PeftModel.from_pretrained(base, tmp_path / "adapter"))
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-4)

    def test_a_head_that_the_adapter_freezes_is_refused_by_name(self):
        for method in ("mei", "entame"):
            model = apply_entame(vit(), EntameConfig.for_method(method))
            with pytest.raises(InputError, match=r'`classifier` would be frozen.*modules_to_save=\["classifier"\]'):
                get_peft_model(model, LoraConfig(**LORA))
        kept = apply_entame(vit(), EntameConfig.for_method("keep"))
        assert isinstance(get_peft_model(kept, LoraConfig(**LORA)), PeftModel)
        assert isinstance(get_peft_model(fold_entame(apply_entame(vit())), LoraConfig(**LORA)), PeftModel)

    def test_a_frozen_head_is_refused_by_name(self):
        model = vit().requires_grad_(False)
        with pytest.raises(InputError, match=r"`classifier` is frozen"):
            apply_entame(model)
        added = vit()
        added.add_adapter(LoraConfig(**LORA))
        with pytest.raises(InputError, match=r"`classifier` is frozen.*modules_to_save"):
            apply_entame(added)
        assert apply_entame(model, EntameConfig.for_method("keep")) is model

    def test_an_adapter_added_by_transformers_that_lacks_the_head_is_not_saved(self, tmp_path):
        model = apply_entame(vit())
        model.add_adapter(LoraConfig(**LORA))
        with pytest.raises(InputError, match=r'`classifier` was changed.*modules_to_save=\["classifier"\]'):
            model.save_pretrained(tmp_path / "adapter")

    @pytest.mark.parametrize("method", ["mei", "base"])
    def test_a_head_that_lora_adapts_is_not_saved_alone_and_merges(self, tmp_path, method):
        base = apply_entame(vit(), EntameConfig.for_method(method))
        model = with_adapters(base, target_modules=["q_proj", "classifier"], modules_to_save=None)
        expected = learn(model)
        with pytest.raises(InputError, match="merge_and_unload"):
            model.save_pretrained(tmp_path / "adapter")
        merged = model.merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(logits(vit(tmp_path / "merged")), expected, rtol=0, atol=1e-4)

    @pytest.mark.parametrize("method", ["fn", "entame", "informed"])
    def test_lora_on_a_normalised_head_is_refused(self, method):
        """It would read raw features, and merging it would give other logits."""
        base = apply_entame(vit(), EntameConfig.for_method(method))
        with pytest.raises(InputError, match=r"`classifier` is adapted by LoRA, .* not normalised"):
            with_adapters(base, target_modules=["q_proj", "classifier"], modules_to_save=None)

    def test_lora_on_a_kept_head_is_saved(self, tmp_path):
        vit().save_pretrained(tmp_path / "base")
        base = apply_entame(vit(tmp_path / "base"), EntameConfig.for_method("keep"))
        model = with_adapters(base, target_modules=["q_proj", "classifier"], modules_to_save=None)
        expected = learn(model)
        model.save_pretrained(tmp_path / "adapter")
        torch.testing.assert_close(loaded(tmp_path / "adapter", tmp_path / "base"), expected, rtol=0, atol=1e-4)


def test_a_head_that_the_adapter_would_not_save_is_refused(tmp_path):
    for lora in ({"modules_to_save": None}, {"target_modules": ["classifier"], "modules_to_save": None}):
        trainer = EntameTrainer(with_adapters(vit(), **lora), arguments(tmp_path), train_dataset=DATA)
        with pytest.raises(ValueError, match=r'modules_to_save=\["classifier"\]'):
            trainer.train()
    with pytest.raises(ValueError, match="read features that are not normalised"):
        apply_entame(with_adapters(vit(), target_modules=["classifier"], modules_to_save=None))
    with pytest.raises(ValueError, match="before peft"):
        apply_entame(with_adapters(vit()), num_labels=7)
    bare = get_peft_model(timm.create_model("test_vit"), LoraConfig(target_modules=["qkv"]))
    with pytest.raises(ValueError, match="Wrap a timm model"):
        EntameTrainer(bare, arguments(tmp_path), train_dataset=DATA)


def test_a_trained_adapter_is_not_wiped(tmp_path):
    model = with_adapters(vit())
    EntameTrainer(model, arguments(tmp_path), train_dataset=DATA).train()
    with pytest.raises(ValueError, match="adapted with ENTAME before"):
        EntameTrainer(model, arguments(tmp_path), train_dataset=DATA).train()
    assert isinstance(model, PeftModel)
