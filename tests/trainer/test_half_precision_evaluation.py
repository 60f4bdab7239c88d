"""An evaluation in half precision leaves the weights as they are, for whatever comes after it."""

from __future__ import annotations

import pytest
import timm
import torch
from conftest import RandomImages
from safetensors.torch import load_file

from entame_hf import EntameTrainer, EntameTrainingArguments

pytestmark = pytest.mark.runs

DATA = RandomImages(48)


def trainer(folder, precision, **changes):
    torch.manual_seed(0)
    defaults = {
        **{"max_steps": 4, "save_steps": 2, "logging_steps": 1, "energy_logging_steps": 0, "report_to": "none"},
        **{"per_device_train_batch_size": 16, "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-3},
    }
    args = EntameTrainingArguments(str(folder), **{**defaults, **precision, **changes})
    model = timm.create_model("test_resnet", num_classes=10)
    return EntameTrainer(model, args, train_dataset=DATA, eval_dataset=DATA)


PRECISIONS = [{"bf16_full_eval": True}, {"fp16_full_eval": True}]
each_precision = pytest.mark.parametrize("precision", PRECISIONS, ids=["bf16", "fp16"])


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_exact(state):
    return {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float32}


@each_precision
@pytest.mark.parametrize(
    "evaluate",
    [lambda t: t.evaluate(), lambda t: t.predict(DATA), lambda t: t.evaluate({"a": DATA, "b": RandomImages(8)})],
    ids=["evaluate", "predict", "several sets"],
)
def test_evaluations_leave_the_weights_alone(tmp_path, precision, evaluate):
    done = trainer(tmp_path, precision)
    done.train()
    before = weights(done.model)
    evaluate(done)
    torch.testing.assert_close(done.model.state_dict(), before, rtol=0, atol=0)
    done.save_model()
    saved = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert is_exact(saved.state_dict())
    assert is_exact(load_file(tmp_path / "entame_head.safetensors"))


@each_precision
def test_a_training_after_an_evaluation_is_the_same(tmp_path, precision):
    alone = trainer(tmp_path / "alone", {})
    alone.train()
    done = trainer(tmp_path / "after", precision)
    done.evaluate()
    done.predict(DATA)
    done.train()
    torch.testing.assert_close(done.model.state_dict(), alone.model.state_dict(), rtol=0, atol=0)


def test_the_best_model_is_loaded_saved_and_trained_further_as_it_was(tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    done = trainer(tmp_path, {"fp16_full_eval": True}, **options)
    done.train()
    done.evaluate()
    best = load_file(f"{done.state.best_model_checkpoint}/model.safetensors")
    done.save_model()
    torch.testing.assert_close(load_file(tmp_path / "model.safetensors"), best, rtol=0, atol=0)
    longer = trainer(tmp_path, {"fp16_full_eval": True}, **options, max_steps=6)
    longer.evaluate()
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    whole = trainer(tmp_path / "whole", {}, **options, max_steps=6)
    whole.train()
    torch.testing.assert_close(longer.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_an_evaluation_that_fails_leaves_the_weights_alone_too(tmp_path):
    done = trainer(tmp_path, {"bf16_full_eval": True})
    before = weights(done.model)

    def fail(_):
        raise ZeroDivisionError

    done.compute_metrics = fail
    with pytest.raises(ZeroDivisionError):
        done.evaluate()
    torch.testing.assert_close(done.model.state_dict(), before, rtol=0, atol=0)


def test_what_is_pushed_after_an_evaluation_is_exact(tmp_path, monkeypatch):
    done = trainer(tmp_path, {"fp16_full_eval": True})
    done.train()
    done.evaluate()
    pushed = []
    monkeypatch.setattr(
        "entame_hf.trainer.trainer.push_folder",
        lambda target, folder, *_: pushed.append(load_file(f"{folder}/model.safetensors")),
    )
    done.hub_model_id = "ada/model"
    done.push_to_hub()
    assert is_exact(pushed[0])
    expected = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    torch.testing.assert_close(pushed[0], expected, rtol=0, atol=0)
