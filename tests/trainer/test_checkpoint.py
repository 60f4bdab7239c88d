"""What is saved is the stock model, and what is resumed is the run."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
import textwrap

import pytest
import timm
import torch
from conftest import RandomImages
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, TrainerCallback

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, apply_entame, fold_entame
from entame_hf.patch import stock_state_dict

DATA = RandomImages(48)


def train(folder, model, max_steps=4, resume=None, entame=None, **changes):
    args = EntameTrainingArguments(
        str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=16,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        disable_tqdm=True,
        use_cpu=True,
        **changes,
    )
    trainer = EntameTrainer(model, args, train_dataset=DATA, eval_dataset=DATA, entame=entame)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def timm_resnet():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=10)


@pytest.mark.parametrize("method", ["entame", "mei", "fn", "keep"])
def test_stock_state_dict_has_the_stock_names(method):
    model = timm_resnet()
    names = set(model.state_dict())
    apply_entame(model, EntameConfig.for_method(method))
    assert set(stock_state_dict(model)) == names


@pytest.mark.parametrize("kind", ["timm", "transformers"])
@pytest.mark.runs
def test_checkpoints_load_in_a_process_without_this_package(tmp_path, tiny_vit, kind):
    model = timm_resnet() if kind == "timm" else tiny_vit
    trainer = train(tmp_path, model)
    trainer.save_model(str(tmp_path / "final"))
    torch.save(torch.tensor(trainer.predict(DATA).predictions), tmp_path / "logits.pt")
    torch.save(DATA.images, tmp_path / "images.pt")
    script = f"""
        import sys
        sys.modules["entame_hf"] = None
        import timm, torch, warnings
        from transformers import AutoModelForImageClassification, TrainerCallback
        warnings.simplefilter("error")
        images, logits = torch.load("images.pt"), torch.load("logits.pt")
        for folder in ("final", "checkpoint-4"):
            model, report = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
            assert not any(report.values()), report
            with torch.no_grad():
                torch.testing.assert_close(model.eval()(images).logits, logits, rtol=0, atol=1e-4)
            if "{kind}" == "timm":
                model = timm.create_model(f"local-dir:{{folder}}", pretrained=True).eval()
                with torch.no_grad():
                    torch.testing.assert_close(model(images), logits, rtol=0, atol=1e-4)
    """
    command = [sys.executable, "-I", "-c", textwrap.dedent(script)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_saving_leaves_the_model_in_training_as_it_was(tmp_path):
    model = timm_resnet()
    trainer = train(tmp_path, model)
    before = copy.deepcopy(model.state_dict())
    trainer.save_model(str(tmp_path / "final"))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not hasattr(trainer.model.config, "entame")


def test_the_saved_config_says_what_was_done(tmp_path):
    trainer = train(tmp_path, timm_resnet(), phi_w=1e-10)
    record = json.loads((tmp_path / "checkpoint-4" / "config.json").read_text())["entame"]
    assert record["method"] == "entame"
    assert record["phi_w"] == 1e-10
    assert record["learning_rate"] == trainer.args.learning_rate
    assert record["num_labels"] == 10
    assert set(record["versions"]) == {"entame-hf", "timm", "torch", "transformers"}


def test_weights_are_saved_under_timms_names(tmp_path):
    train(tmp_path, timm_resnet())
    names = set(load_file(tmp_path / "checkpoint-4" / "model.safetensors"))
    assert names == set(timm_resnet().state_dict())


@pytest.mark.parametrize("method", ["entame", "base_wu", "keep"])
@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_resuming_is_bit_exact(tmp_path, tiny_vit, kind, method):
    start = timm_resnet() if kind == "timm" else tiny_vit
    whole, resumed = copy.deepcopy(start), copy.deepcopy(start)
    train(tmp_path, whole, entame_method=method)
    train(tmp_path, resumed, entame_method=method, resume=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_resuming_with_another_method_is_refused(tmp_path):
    train(tmp_path, timm_resnet())
    with pytest.raises(ValueError, match="`feature_norm`: True in the checkpoint, False in this run"):
        train(tmp_path, timm_resnet(), entame_method="mei", resume=True)


def test_the_best_model_comes_back_with_its_statistics(tmp_path):
    trainer = train(
        tmp_path,
        timm_resnet(),
        max_steps=8,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert max(losses) != losses[-1]
    assert trainer.evaluate()["eval_loss"] == max(losses)


def test_a_best_model_that_was_removed_costs_no_finished_training(tmp_path):
    class Removing(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            shutil.rmtree(tmp_path / f"checkpoint-{state.global_step}")

    args = EntameTrainingArguments(
        str(tmp_path),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = EntameTrainer(timm_resnet(), args, train_dataset=DATA, eval_dataset=DATA, callbacks=[Removing()])
    assert trainer.train().global_step == 2


def test_going_on_from_a_kept_head_can_be_resumed(tmp_path, tiny_vit):
    train(tmp_path / "first", tiny_vit)
    keep = EntameConfig(init="keep")

    def adapted():
        return AutoModelForImageClassification.from_pretrained(tmp_path / "first" / "checkpoint-4")

    whole, resumed = adapted(), adapted()
    train(tmp_path / "second", whole, entame=keep)
    train(tmp_path / "second", resumed, entame=keep, resume=str(tmp_path / "second" / "checkpoint-2"))
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: model],
    ids=["copy", "pickle", "itself"],
)
def test_saving_without_the_trainer_writes_the_stock_model(tmp_path, tiny_vit, clone):
    trainer = train(tmp_path / "run", tiny_vit)
    expected = torch.tensor(trainer.predict(DATA).predictions)
    model = clone(tiny_vit)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(DATA.images).logits, expected, rtol=0, atol=1e-4)


def test_saving_after_folding_is_stock(tmp_path, tiny_vit):
    train(tmp_path / "run", tiny_vit)
    fold_entame(tiny_vit).save_pretrained(tmp_path / "saved")
    assert "save_pretrained" not in vars(tiny_vit)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded.state_dict(), tiny_vit.state_dict(), rtol=0, atol=0)


def test_label_names_are_in_the_order_of_their_indices(tmp_path):
    trainer = train(tmp_path, timm_resnet())
    trainer.model.config.id2label = {index: f"class {index}" for index in reversed(range(10))}
    trainer.save_model(str(tmp_path / "final"))
    names = json.loads((tmp_path / "final" / "config.json").read_text())["label_names"]
    assert names == [f"class {index}" for index in range(10)]


def test_a_class_that_takes_more_than_a_config_can_be_resumed(tmp_path, tiny_vit):
    class WeightedForImageClassification(type(tiny_vit)):
        def __init__(self, config, weight):
            super().__init__(config)
            self.weight = weight

    def model():
        torch.manual_seed(0)
        return WeightedForImageClassification(tiny_vit.config, 1.0)

    train(tmp_path, model())
    resumed = train(tmp_path, model(), resume=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4


def test_an_untrained_wrapper_is_saved_under_timms_names(tmp_path):
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True)
    EntameTrainer(timm_resnet(), args).save_model(str(tmp_path / "saved"))
    assert timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).num_classes == 10
    assert "entame" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_no_config_says_where_timm_read_the_weights(tmp_path):
    train(tmp_path / "first", timm_resnet())
    model = timm.create_model(f"local-dir:{tmp_path / 'first' / 'checkpoint-4'}", pretrained=True)
    trainer = train(tmp_path / "second", model, entame_method="keep")
    assert str(tmp_path) not in (tmp_path / "second" / "checkpoint-4" / "config.json").read_text()
    assert trainer.model.config.pretrained_cfg["source"] == "local-dir"
    timm.create_model(f"local-dir:{tmp_path / 'second' / 'checkpoint-4'}", pretrained=True)


def test_saving_a_head_without_a_bias_over_normalised_features_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False))
    apply_entame(model, EntameConfig(head="0"))
    with pytest.raises(ValueError, match="mei"):
        stock_state_dict(model)
