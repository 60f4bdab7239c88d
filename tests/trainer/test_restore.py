"""A resumed run is where the checkpoint's run was: its best checkpoint, its callbacks, its place in a stream."""

from __future__ import annotations

import copy
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import RandomImages
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.utils import logging

from entame_hf import EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.trainer.restore import restore_state


class Stream(IterableDataset):
    """A stream of one's own that ends, without a length."""

    def __init__(self, count):
        self.images = RandomImages(count)

    def __iter__(self):
        return (self.images[index] for index in range(len(self.images)))


def trainer(folder, model, data, **changes):
    own = {name: changes.pop(name) for name in ("callbacks", "eval_dataset", "compute_metrics") if name in changes}
    options = {"max_steps": 12, "save_steps": 5, "logging_steps": 1, "learning_rate": 1e-3, "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 16, "use_cpu": True, "report_to": "none", **changes}
    return EntameTrainer(model(10), EntameTrainingArguments(str(folder), **options), train_dataset=data, **own)


@pytest.fixture
def new_model(tiny_vit):
    return lambda num_labels: copy.deepcopy(tiny_vit)


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
    return caplog


@pytest.mark.parametrize(("step", "most", "said"), [(4, 4, True), (6, 4, True), (3, 4, False)])
def test_a_run_without_a_step_left_says_so(warnings, step, most, said):
    state, handler = TrainerState(global_step=step, max_steps=most), SimpleNamespace(callbacks=[])
    assert restore_state(SimpleNamespace(state=state, callback_handler=handler), "checkpoint-4", (1, 0)) == (1, 0)
    assert ("so no step is taken" in warnings.text) == said


@pytest.mark.runs
@pytest.mark.parametrize("moved", [False, True])
def test_the_best_checkpoint_lies_beside_the_one_that_is_resumed(tmp_path, new_model, moved):
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "eval_dataset": RandomImages(32)}
    # The first evaluation is the best of equals.
    options |= {"load_best_model_at_end": True, "compute_metrics": lambda _: {"a": 1.0}, "metric_for_best_model": "a"}
    trainer(tmp_path / "a", new_model, RandomImages(64), **options, max_steps=4).train()
    start = tmp_path / "a"
    if moved:
        start = (tmp_path / "a").rename(tmp_path / "b")
    resumed = trainer(tmp_path / "c", new_model, RandomImages(64), **options, max_steps=6)
    resumed.train(resume_from_checkpoint=str(start / "checkpoint-4"))
    assert resumed.state.best_model_checkpoint == str(start / "checkpoint-2")
    assert resumed.evaluations.loaded_step == 2


@pytest.mark.runs
@pytest.mark.parametrize("patience", [4, 6])
def test_evaluations_without_improvement_are_counted_on(tmp_path, new_model, patience):
    def run(steps, patience):
        options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
        options |= {"eval_dataset": RandomImages(16), "compute_metrics": lambda _: {"a": 1.0}}
        options |= {"metric_for_best_model": "a", "callbacks": [EarlyStoppingCallback(patience)]}
        return trainer(tmp_path, new_model, RandomImages(64), **options, max_steps=steps)

    run(3, 4).train()
    resumed = run(12, patience)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 1 + patience


@pytest.mark.runs
@pytest.mark.parametrize("step", [5, 10])
@pytest.mark.parametrize(("count", "accumulation"), [(64, 1), (70, 1), (80, 2)])
def test_a_stream_of_ones_own_is_resumed_where_it_was(tmp_path, new_model, count, accumulation, step):
    options = {"gradient_accumulation_steps": accumulation}
    whole = trainer(tmp_path, new_model, Stream(count), **options)
    whole.train()
    for later in {5, 10, 12} - {5, step}:
        shutil.rmtree(tmp_path / f"checkpoint-{later}")
    resumed = trainer(tmp_path, new_model, Stream(count), **options)
    resumed.train(resume_from_checkpoint=True)
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert resumed.state.epoch == whole.state.epoch


class Gradients(TrainerCallback):
    """Note the norm of a step's gradient."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.norms.append(float(kwargs["model"].classifier.bias.grad.norm()))


@pytest.mark.runs
@pytest.mark.parametrize("rest", [0, 16])
def test_the_rest_of_a_pass_leaves_the_next_step_alone(tmp_path, new_model, warnings, rest):
    seen = Gradients()
    options = {"gradient_accumulation_steps": 2, "learning_rate": 1e-12, "max_steps": 6, "save_strategy": "no"}
    trainer(tmp_path, new_model, Stream(64 + rest), **options, max_grad_norm=0, callbacks=[seen]).train()
    # The same four batches in each pass.
    assert seen.norms[0::2] == pytest.approx([seen.norms[0]] * 3, rel=1e-4)
    assert seen.norms[1::2] == pytest.approx([seen.norms[1]] * 3, rel=1e-4)
    assert ("ends within a step of 2 batches: its last 1 are left out" in warnings.text) == bool(rest)


def test_a_stream_that_fills_no_step_is_refused(tmp_path, new_model):
    with pytest.raises(
        InputError, match=r"fewer batches \(1\) than a step takes\. Set `gradient_accumulation_steps=1`"
    ):
        trainer(tmp_path, new_model, Stream(16), gradient_accumulation_steps=2).train()
