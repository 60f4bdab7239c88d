"""What measuring energies costs, and that it never stops a run."""

import copy
import math
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import RandomImages
from test_energies import Patches, arguments, assert_agree, energies, measured_steps, train
from transformers import Trainer, TrainingArguments

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments
from entame_hf.errors import NonFiniteError


class TestCost:
    @pytest.mark.parametrize("steps", [0, 2])
    def test_hooks_are_there_on_measured_steps_alone(self, tmp_path, tiny_vit, steps):
        seen = []
        forward = tiny_vit.forward

        def counting(*args, **kwargs):
            hooks = tiny_vit.classifier._forward_pre_hooks.values()
            seen.append(sum(isinstance(hook, partial) for hook in hooks))
            return forward(*args, **kwargs)

        tiny_vit.forward = counting
        settings = {"max_steps": 4, "remove_unused_columns": False, "znorm_refresh_samples": 0}
        args = arguments(tmp_path, energy_logging_steps=steps, **settings)
        train(tiny_vit, args, train_dataset=RandomImages(64))
        assert seen == [1] * steps + [0] * (4 - steps)

    def test_one_value_a_measured_step_travels_to_the_host(self, tmp_path, tiny_vit, calls_to_host):
        def transfers(steps):
            calls_to_host.clear()
            args = arguments(tmp_path, energy_logging_steps=steps, max_steps=4)
            train(copy.deepcopy(tiny_vit), args, train_dataset=RandomImages(64))
            return Counter(calls_to_host)

        off = transfers(0)
        assert off, "Trainer reads its loss: the counters count nothing"
        # The float is the noise share of `base`, once in a training.
        assert transfers(2) - off == Counter(tolist=2, __float__=1)

    @pytest.mark.runs
    def test_a_compiled_graph_is_left_alone(self, tmp_path):
        config = EntameConfig.for_method("base", head="head")

        def run(steps, **changes):
            torch.manual_seed(0)
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            args = arguments(tmp_path, energy_logging_steps=steps, max_steps=6, logging_steps=3, **changes)
            trainer = train(Patches(), args, train_dataset=RandomImages(96), entame=config)
            counters = torch._dynamo.utils.counters
            return trainer, counters["stats"]["unique_graphs"], dict(counters["graph_break"])

        compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
        (_, graphs, breaks), (on, graphs_on, breaks_on) = run(0, **compiled), run(1, **compiled)
        assert graphs >= 1
        assert graphs_on <= graphs
        assert breaks_on == breaks
        assert measured_steps(on) == [1, 3, 6]
        plain, *_ = run(1)
        for step in (1, 3, 6):
            assert_agree(energies(on, step), energies(plain, step))


class TestNeverStopsATraining:
    def test_a_frozen_backbone(self, tmp_path, tiny_vit):
        logged = energies(train(tiny_vit, arguments(tmp_path, freeze_backbone=True)))
        assert "features" not in logged
        assert logged["grad_norm_backbone"] == 0
        assert logged["noise_share"] == pytest.approx(1 / 9, abs=1e-4)

    def test_what_is_not_finite_is_not_logged(self, tmp_path, tiny_vit):
        data = RandomImages(16)
        data.images[3] = math.nan
        trainer = EntameTrainer(tiny_vit, arguments(tmp_path, entame_method="mei"), train_dataset=data)
        with pytest.raises(NonFiniteError):
            trainer.train()
        logged = energies(trainer)
        assert "phi_w" in logged
        assert "total" not in logged
        assert all(math.isfinite(value) for value in logged.values())

    def test_a_step_that_was_cut_off(self, tmp_path, tiny_vit):
        """What a failed step has left behind goes into no other."""

        class Interrupted(EntameTrainer):
            fails = True

            def training_step(self, *args, **kwargs):
                loss = super().training_step(*args, **kwargs)
                if self.fails:
                    raise KeyboardInterrupt
                return loss

        args = arguments(tmp_path, entame_method="base")
        trainer = Interrupted(copy.deepcopy(tiny_vit), args, train_dataset=RandomImages(16))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert not trainer.model.classifier._forward_pre_hooks
        trainer.fails = False
        trainer.train()
        assert_agree(energies(trainer), energies(train(tiny_vit, args)))

    def test_labels_that_are_no_classes(self, tmp_path, tiny_vit):
        def data(classes):
            labels = [i % 10 if i < classes else -100 for i in range(16)]
            return [{"pixel_values": torch.randn(3, 32, 32), "labels": torch.tensor(label)} for label in labels]

        args = arguments(tmp_path, per_device_train_batch_size=16, max_steps=1)
        logged = energies(train(copy.deepcopy(tiny_vit), args, train_dataset=data(4)))
        assert logged["total"] > 0
        # Without any, the loss stops the training, and measuring does not.
        with pytest.raises(NonFiniteError):
            train(tiny_vit, args, train_dataset=data(0))


def test_trainer_itself_logs_the_same_losses(tmp_path, tiny_vit):
    """Measuring changes nothing of what is measured."""

    def losses(kind, steps):
        changes = {} if kind is Trainer else {"energy_logging_steps": steps, "entame_method": "keep"}
        args = arguments(
            tmp_path,
            TrainingArguments if kind is Trainer else EntameTrainingArguments,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-3,
            optim="sgd",
            lr_scheduler_type="constant",
            **changes,
        )
        trainer = kind(copy.deepcopy(tiny_vit), args, train_dataset=RandomImages(48))
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert losses(EntameTrainer, 3) == losses(EntameTrainer, 0) == pytest.approx(losses(Trainer, 0), abs=1e-6)
