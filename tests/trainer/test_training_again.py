"""What a call of `train()` leaves behind changes nothing in the next one; and INFO lines are shown."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conftest import RandomImages
from transformers import TrainerCallback

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError

pytestmark = pytest.mark.runs


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fresh(folder, model, **changes):
    options = {"max_steps": 3, "save_strategy": "no", "disable_tqdm": True, **changes}
    args = EntameTrainingArguments(str(folder), use_cpu=True, per_device_train_batch_size=16, **options)
    return EntameTrainer(copy.deepcopy(model), args, train_dataset=RandomImages(64))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("options", [{}, {"freeze_backbone": True}, {"entame_method": "keep"}], ids=str)
def test_after_an_error_before_the_first_step(tmp_path, tiny_vit, monkeypatch, error, options):
    expected, again = (fresh(tmp_path / name, tiny_vit, **options) for name in ("a", "b"))
    expected.train()

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(type(tiny_vit), "forward", fail)
        with pytest.raises(error):
            again.train()
    assert all(parameter.requires_grad for parameter in again.model.parameters())
    again.train()
    torch.testing.assert_close(weights(again.model), weights(expected.model), rtol=0, atol=0)


def test_after_an_evaluation(tmp_path, tiny_vit):
    expected, again = fresh(tmp_path / "a", tiny_vit), fresh(tmp_path / "b", tiny_vit)
    expected.train()
    again.evaluate(RandomImages(16))
    again.train()
    torch.testing.assert_close(weights(again.model), weights(expected.model), rtol=0, atol=0)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_head_that_has_learned_is_not_wiped_and_resumes(tmp_path, tiny_vit, error):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if error is not None and state.global_step == 2:
                raise error

    whole, again = (fresh(tmp_path / name, tiny_vit, save_strategy="steps", save_steps=1) for name in ("a", "b"))
    whole.train()
    again.add_callback(Failing())
    if error is None:
        again.train()
    else:
        with pytest.raises(error):
            again.train()
    again.remove_callback(Failing)
    before = weights(again.model)
    with pytest.raises(InputError, match="adapted with ENTAME before"):
        again.train()
    torch.testing.assert_close(weights(again.model), before, rtol=0, atol=0)
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-1"))
    torch.testing.assert_close(weights(again.model), weights(whole.model), rtol=0, atol=0)


def test_a_second_training_has_the_arguments_and_parameters_of_its_own(tmp_path, tiny_vit):
    for parameter in tiny_vit.vit.parameters():
        parameter.requires_grad = False
    trainer = fresh(tmp_path, tiny_vit, logging_steps=1)
    trainer.train()
    before = weights(trainer.model.vit)
    trainer.model.vit.requires_grad_(True)
    trainer.args.learning_rate, trainer.args.entame_method = 1e-2, "keep"
    trainer.train()
    assert {entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry} == {1e-2}
    assert all(not torch.equal(tensor, before[name]) for name, tensor in weights(trainer.model.vit).items())


def test_a_second_training_keeps_the_optimizer_that_was_given(tmp_path, tiny_vit):
    trainer = fresh(tmp_path, tiny_vit, entame_method="keep")
    trainer.create_optimizer()
    mine = trainer.optimizer
    trainer.train()
    trainer.train()
    assert trainer.optimizer.optimizer is mine
    trainer = fresh(tmp_path, tiny_vit, entame_method="keep")
    trainer.optimizer = mine = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)
    trainer.train()
    trainer.train()
    assert trainer.optimizer.optimizer is mine


def test_info_is_shown_once_where_nobody_listens_yet(tmp_path):
    code = f"""
        import timm, torch
        from conftest import RandomImages
        from entame_hf import EntameTrainer, EntameTrainingArguments
        args = EntameTrainingArguments({str(tmp_path)!r}, log_level="info", max_steps=1, use_cpu=True)
        for _ in range(2):
            model = timm.create_model("test_resnet", num_classes=10)
            EntameTrainer(model, args, train_dataset=RandomImages(64)).train()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=True)
    assert result.stderr.count("noise over signal") == 2
