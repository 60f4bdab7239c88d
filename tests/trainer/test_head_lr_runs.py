"""A measured head learning rate over a run: resumed, tried again, searched, recorded, refused."""

import copy
import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import OutOfMemoryTrainer, RandomImages, search_learning_rate
from test_head_lr import SCHEDULES, Probe, Rates, arguments, logged, train, two_clusters
from transformers import TrainingArguments, ViTForImageClassification
from transformers.utils import logging

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError, apply_entame
from entame_hf.patch import applied_config
from entame_hf.trainer.checkpoint import saved_record
from entame_hf.trainer.head_lr import MARK
from entame_hf.trainer.parallel import check_sharding

pytestmark = pytest.mark.runs


class TestAgain:
    """What is measured once, and what is measured anew."""

    @pytest.mark.parametrize("schedule", ["constant", "cosine-with-warmup", "plateau"])
    def test_resuming_is_exact_and_measures_nothing(self, tmp_path, tiny_vit, schedule):
        changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
        args = arguments(tmp_path, **changes, **SCHEDULES[schedule])
        evaluation = {"eval_dataset": RandomImages(16, seed=1)}
        whole = train(copy.deepcopy(tiny_vit), args, **evaluation)
        for step in (4, 6):
            shutil.rmtree(tmp_path / f"checkpoint-{step}")
        resumed = train(copy.deepcopy(tiny_vit), args, resume=True, **evaluation)
        assert len(logged(whole)) == 1
        assert logged(resumed) == logged(whole)
        assert resumed.head_rates.record() == whole.head_rates.record()
        torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
        for after, before in zip(resumed.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
            assert (after["lr"], after.get("initial_lr")) == (before["lr"], before.get("initial_lr"))

    @pytest.mark.parametrize(
        ("before", "after", "said"), [("auto", None, "had a .* have none"), (None, 1e-3, "had no")]
    )
    def test_resume_refuses_to_add_or_drop_a_head_learning_rate(self, tmp_path, tiny_vit, before, after, said):
        args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2, head_lr=before)
        train(copy.deepcopy(tiny_vit), args)
        with pytest.raises(InputError, match=f"{said}.*Resume with the same `head_lr`"):
            train(copy.deepcopy(tiny_vit), dataclasses.replace(args, max_steps=4, head_lr=after), resume=True)

    def test_a_smaller_batch_is_measured_anew(self, tmp_path, tiny_vit):
        """With a batch half as large, whose images are other ones."""
        rates = Rates()

        args = arguments(tmp_path, auto_find_batch_size=True, lr_scheduler_type="cosine")
        trainer = train(tiny_vit, args, OutOfMemoryTrainer, callbacks=[rates])
        before, after = rates.steps[:2], rates.steps[2:]
        assert len(before) == 2
        assert len(after) == 3
        assert after[0] == (1e-4, pytest.approx(logged(trainer)[0]))
        assert len(logged(trainer)) == 1
        assert after[0][1] != before[0][1]
        assert after[0][1] == pytest.approx(before[0][1], rel=0.1)

    def test_an_interrupted_step_is_not_measured(self, tmp_path, tiny_vit):
        args = arguments(tmp_path, auto_find_batch_size=True, optim="sgd", gradient_accumulation_steps=4, max_steps=1)
        again = train(copy.deepcopy(tiny_vit), args, OutOfMemoryTrainer)
        args.per_device_train_batch_size = again._train_batch_size
        assert logged(again) == pytest.approx(logged(train(tiny_vit, args)), rel=1e-6)

    def test_each_trial_of_a_search_measures_its_rate(self, tmp_path, tiny_vit):
        pytest.importorskip("optuna")
        seen = []

        class Watched(EntameTrainer):
            def log(self, logs, *args, **kwargs):
                if "head_lr" in logs:
                    seen.append((self.args.learning_rate, logs["head_lr"]))
                super().log(logs, *args, **kwargs)

        search_learning_rate(Watched, arguments(tmp_path, eval_strategy="epoch"), tiny_vit)
        assert len({base for base, _ in seen}) == 3
        assert len({head for _, head in seen}) == 1

    def test_a_second_run_measures_anew(self, tmp_path, tiny_vit):
        args = arguments(tmp_path, head_lr="auto")
        trainer = train(tiny_vit, args, entame=EntameConfig.for_method("keep"))
        (first,) = logged(trainer)
        trainer.train_dataset.images *= 3
        trainer.train()
        (second,) = logged(trainer)
        assert second != first
        groups = [group for group in trainer.optimizer.param_groups if MARK in group]
        assert {group["lr"] for group in groups} == {second}


class TestWhatIsTold:
    def test_config_and_card_show_the_rate(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path))
        trainer.save_model()
        trainer.create_model_card()
        (peak,) = logged(trainer)
        record = json.loads((tmp_path / "config.json").read_text())["entame"]
        assert record["head_lr"] == {"asked": "auto", "peak": {"classifier": peak}}
        card = (tmp_path / "README.md").read_text()
        assert f"| head learning rate | {peak:.4g}, measured in the first step |" in card
        assert "| `head_lr` | auto |" in card
        # Somebody else's card, of a model that says it of itself.
        loaded = ViTForImageClassification.from_pretrained(tmp_path)
        again = EntameTrainer(loaded, TrainingArguments(str(tmp_path / "again"), report_to="none", use_cpu=True))
        again.create_model_card()
        assert "measured in the first step" in (tmp_path / "again" / "README.md").read_text()

    @pytest.mark.parametrize(
        ("change", "row"),
        [
            ({"head_lr": 2e-3}, "| head learning rate | 0.002 |"),
            ({"head_lr": None, "head_lr_multiplier": 10.0}, "| head learning rate | 0.001 |"),
        ],
        ids=["given", "multiplied"],
    )
    def test_a_rate_that_was_not_measured(self, tmp_path, tiny_vit, change, row):
        train(tiny_vit, arguments(tmp_path, **change)).create_model_card()
        assert row in (tmp_path / "README.md").read_text()

    def test_a_head_at_the_base_rate_has_none_of_its_own(self, tmp_path, tiny_vit):
        trainer = train(tiny_vit, arguments(tmp_path, head_lr=None))
        trainer.save_model()
        trainer.create_model_card()
        assert json.loads((tmp_path / "config.json").read_text())["entame"]["head_lr"] is None
        assert "head learning rate" not in (tmp_path / "README.md").read_text()
        assert not any(MARK in group for group in trainer.optimizer.param_groups)


class TestRefusals:
    @pytest.mark.parametrize("optimizer", ["rmsprop", "adafactor"])
    def test_an_unknown_optimizer_is_refused(self, tmp_path, tiny_vit, optimizer):
        with pytest.raises(InputError, match=r"not those of \w+\. Give the rate, .* `optim=adamw_torch`"):
            train(copy.deepcopy(tiny_vit), arguments(tmp_path, optim=optimizer))
        train(tiny_vit, arguments(tmp_path, optim=optimizer, head_lr=1e-3))

    def test_a_momentum_of_one_is_refused(self, tmp_path, tiny_vit):
        with pytest.raises(InputError, match=r"momentum=1, with which steps grow for ever\. Give less, such as 0\.9"):
            train(tiny_vit, arguments(tmp_path, optim="sgd", optim_args="momentum=1.0"))

    @pytest.mark.parametrize(("factor", "norm"), [(0, "0.0"), (math.nan, "nan"), (math.inf, "inf")])
    def test_zero_and_infinite_features_are_refused(self, tmp_path, factor, norm):
        data = two_clusters(32)
        data.features = torch.ones_like(data.features) * factor
        model = Probe(32, 2)
        with pytest.raises(InputError, match=rf"What head reads in the first step is zero or not finite \({norm}\)"):
            train(model, arguments(tmp_path), data=data, entame=EntameConfig.for_method("mei", head="head"))
        assert model.head.weight.isfinite().all()

    def test_a_compute_loss_that_skips_the_measurement_is_refused(self, tmp_path, tiny_vit):
        class Own(EntameTrainer):
            def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
                outputs = model(**inputs)
                return (outputs.loss, outputs) if return_outputs else outputs.loss

        with pytest.raises(InputError, match=r"super\(\)\.compute_loss"):
            train(tiny_vit, arguments(tmp_path), Own)

    @pytest.mark.parametrize("option", [{"head_lr": "auto"}, {"head_lr": 1e-2}, {"head_lr_multiplier": 10.0}])
    def test_a_users_optimizer_is_left_alone(self, tmp_path, tiny_vit, monkeypatch, caplog, option):
        monkeypatch.setattr(logging.get_logger("transformers"), "propagate", True)
        optimizer = torch.optim.Adam(tiny_vit.parameters(), lr=1e-3)
        args = arguments(tmp_path, **{"head_lr": None, **option})
        trainer = train(tiny_vit, args, optimizers=(optimizer, None))
        assert f"{next(iter(option))} is ignored: the optimizer was built by you" in caplog.text
        assert [group["lr"] for group in optimizer.param_groups] == [1e-3]
        assert trainer.head_rates.record() is None
        assert logged(trainer) == []

    def test_deepspeed_steps_before_a_measured_rate_could_be_set(self):
        accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=object()))
        config = EntameConfig.for_method("mei")
        check_sharding(accelerator, config, 0)
        with pytest.raises(InputError, match=r"head_lr=1e-3"):
            check_sharding(accelerator, config, 0, measures_head_lr=True)


def test_the_recommended_recipe_measures_beside_a_config_that_was_applied(tmp_path, tiny_vit):
    applied = EntameConfig(phi_w=1e-8, feature_norm=False)
    args = EntameTrainingArguments(str(tmp_path), recipe="recommended", max_steps=2, report_to="none", use_cpu=True)
    trainer = train(apply_entame(tiny_vit, applied), args)
    assert applied_config(tiny_vit) == trainer.entame_config() == applied
    assert len(logged(trainer)) == 1
    trainer.save_model()
    assert saved_record(tmp_path)["method"] == "mei"
