"""The card of a trainer is true of the weights beside it."""

import copy
import itertools
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from conftest import RandomImages
from huggingface_hub import ModelCard
from torch import nn
from transformers import AutoModelForImageClassification, TrainerCallback, TrainingArguments, ViTImageProcessor
from transformers.trainer_utils import EvalLoopOutput

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, InputError
from entame_hf.metrics import metrics_of_predictions, predicted_classes
from entame_hf.patch import as_transformers
from entame_hf.plots import series
from entame_hf.trainer.report import write_card

pytestmark = pytest.mark.runs

TRAIN, TEST = RandomImages(48), RandomImages(40, seed=1)

BEST = {"load_best_model_at_end": True, "metric_for_best_model": "rank", "learning_rate": 3e-2}
BEST |= {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1}


def worse_and_worse():
    """Metrics by which the first checkpoint is the best, whatever the weights are."""
    metrics, count = metrics_of_predictions(), itertools.count()
    return lambda prediction: {**metrics(prediction), "rank": -next(count)}


def trainer_of(folder, model, kind=EntameTrainingArguments, metrics=True, entame=None, **changes):
    defaults = {"max_steps": 4, "per_device_train_batch_size": 16, "logging_steps": 1, "learning_rate": 1e-3}
    defaults |= {
        "save_strategy": "no",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    evaluated = {"compute_metrics": metrics_of_predictions(), "preprocess_logits_for_metrics": predicted_classes}
    args = kind(str(folder), **{**defaults, **changes})
    return EntameTrainer(
        model,
        args,
        train_dataset=TRAIN,
        eval_dataset=TEST,
        processing_class=ViTImageProcessor(size={"height": 32, "width": 32}),
        entame=entame,
        **(evaluated if metrics else {}),
    )


def finished(folder, model, **changes):
    trainer = trainer_of(folder, model, **changes)
    trainer.train()
    trainer.save_model()
    return trainer


def card_of(trainer, **options):
    write_card(trainer, **options)
    return ModelCard.load(f"{trainer.args.output_dir}/README.md")


def accuracy_of(folder):
    """What a reader of the card would measure."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return (model(TEST.images).logits.argmax(-1) == TEST.labels).float().mean().item()


def timm_resnet():
    torch.manual_seed(0)
    return timm.create_model("test_resnet", num_classes=10)


@pytest.mark.parametrize("kind", ["timm", "transformers"])
def test_the_snippets_run_as_they_stand_without_this_package(tmp_path, tiny_vit, kind):
    trainer = finished(tmp_path, timm_resnet() if kind == "timm" else tiny_vit)
    card = card_of(trainer)
    snippets = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert len(snippets) == (2 if kind == "timm" else 1)
    code = "\n".join(['import sys\nsys.modules["entame_hf"] = None', *snippets])
    result = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert sum("LABEL_" in line for line in result.stdout.splitlines()) == len(snippets)
    assert card.data.library_name == kind
    assert card.data.pipeline_tag == "image-classification"


class TestNumbers:
    def of(self, card):
        return {result.metric_name: result.metric_value for result in card.data.eval_results}

    @pytest.mark.parametrize("evaluated_again", [False, True], ids=["not-again", "again"])
    def test_are_the_best_checkpoints_where_it_was_loaded(self, tmp_path, tiny_vit, evaluated_again):
        trainer = trainer_of(tmp_path, tiny_vit, **BEST)
        trainer.compute_metrics = worse_and_worse()
        trainer.train()
        trainer.save_model()
        if evaluated_again:
            trainer.evaluate()
        losses = dict(zip(*series(trainer.state.log_history, "eval_loss"), strict=True))
        assert losses[1] != pytest.approx(losses[4], rel=1e-2)
        card = card_of(trainer)
        assert self.of(card)["accuracy"] == pytest.approx(accuracy_of(tmp_path))
        assert "after optimizer step 1:" in card.text
        evaluation = trainer.evaluations.current(trainer.state)
        assert evaluation.metrics["loss"] == pytest.approx(losses[1], rel=1e-4)
        assert np.trace(evaluation.confusion) / evaluation.confusion.sum() == pytest.approx(self.of(card)["accuracy"])

    def test_are_the_last_ones_where_the_best_checkpoint_was_removed(self, tmp_path, tiny_vit):
        class Remove(TrainerCallback):
            def on_log(self, args, state, control, logs, **kwargs):
                if "train_runtime" in logs:
                    shutil.rmtree(state.best_model_checkpoint)

        trainer = trainer_of(tmp_path, tiny_vit, **BEST)
        trainer.compute_metrics = worse_and_worse()
        trainer.add_callback(Remove())
        trainer.train()
        trainer.save_model()
        assert trainer.state.best_global_step == 1
        assert "after optimizer step 4:" in card_of(trainer).text
        assert self.of(card_of(trainer))["accuracy"] == pytest.approx(accuracy_of(tmp_path))

    def test_are_the_last_ones_otherwise(self, tmp_path, tiny_vit):
        trainer = finished(tmp_path, tiny_vit)
        assert self.of(card_of(trainer))["accuracy"] == pytest.approx(accuracy_of(tmp_path))

    def test_are_left_out_where_nothing_was_evaluated(self, tmp_path, tiny_vit):
        trainer = finished(tmp_path, tiny_vit, kind=TrainingArguments, metrics=False, eval_strategy="no")
        card = card_of(trainer)
        assert card.data.eval_results is None
        assert "## Results" not in card.text
        assert "## Training" in card.text
        assert sorted(path.name for path in tmp_path.glob("*[a-z].png")) == [
            "error_energy.png",
            "feature_variance.png",
            "learning_curves.png",
        ]

    def test_of_several_evaluation_sets_stand_side_by_side(self, tmp_path, tiny_vit):
        trainer = trainer_of(tmp_path, tiny_vit)
        trainer.eval_dataset = {"day": TEST, "night": TRAIN}
        trainer.train()
        assert "| day accuracy |" in card_of(trainer).text
        assert "| night accuracy |" in card_of(trainer).text

    def test_prediction_on_other_data_changes_nothing(self, tmp_path, tiny_vit):
        trainer = finished(tmp_path, tiny_vit)
        before = card_of(trainer).content
        trainer.predict(TRAIN)
        assert card_of(trainer).content == before


@pytest.mark.parametrize("logits", [True, False], ids=["logits", "classes"])
def test_confusion_counts_what_has_a_label(tmp_path, tiny_vit, logits):
    trainer = trainer_of(tmp_path, tiny_vit)
    predictions = np.array([0, 2, 2, 1])
    output = EvalLoopOutput(np.eye(3)[predictions] if logits else predictions, np.array([0, 2, 1, -100]), {}, 4)
    head = SimpleNamespace(module=nn.Linear(1, 3))
    trainer.evaluations.observe(output, trainer.state, lambda: [head])
    trainer.log({"eval_accuracy": 2 / 3})
    assert trainer.evaluations.current(trainer.state).confusion.tolist() == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]


class TestImages:
    def test_the_card_shows_the_most_confidently_wrong(self, tmp_path, tiny_vit):
        trainer = finished(tmp_path, tiny_vit)
        errors = trainer.evaluations.current(trainer.state).errors
        with torch.no_grad():
            probabilities = trainer.model.eval()(TEST.images).logits.softmax(-1)
        confidence, predicted = probabilities.max(-1)
        wrong = (predicted != TEST.labels).nonzero()[:, 0].tolist()
        expected = sorted(wrong, key=lambda index: -confidence[index])[:16]
        np.testing.assert_allclose(errors.confidence, confidence[expected], rtol=1e-4)
        np.testing.assert_array_equal(errors.true, TEST.labels[errors.indices])
        card = card_of(trainer)
        assert "(wrong_images.png)" in card.text
        assert (tmp_path / "wrong_images.png").is_file()
        assert [example["src"] for example in card.data.widget] == [f"example_{i}.png" for i in (1, 2, 3)]
        assert card.data.widget[0]["example_title"] == trainer.model.config.id2label[int(TEST.labels[0])]

    def test_what_is_measured_on_the_training_images_is_left_out(self, tmp_path, tiny_vit):
        trainer = finished(tmp_path, tiny_vit)
        expected = trainer.evaluate()
        assert trainer.evaluate(TRAIN)["eval_loss"] != expected["eval_loss"]
        found = trainer.evaluations.current(trainer.state)
        assert found.metrics["loss"] == expected["eval_loss"]
        assert found.confusion.sum() == len(TEST)

    def test_images_of_another_dataset_are_not_shown_for_it(self, tmp_path, tiny_vit):
        trainer = finished(tmp_path, tiny_vit)
        trainer.evaluate(RandomImages(48))
        assert "wrong_images.png" not in card_of(trainer).text

    def test_no_image_is_shown_if_none_shall_be(self, tmp_path, tiny_vit):
        trainer = finished(tmp_path, tiny_vit)
        (tmp_path / "batch.png").touch()
        assert "(batch.png)" in card_of(trainer).text
        (tmp_path / "README.md").unlink()
        card = card_of(trainer, images=False)
        assert card.data.get("widget") is None
        assert "batch.png" not in card.text
        assert "wrong_images.png" not in card.text

    @pytest.mark.parametrize("items", [[1, 2], [{"pixel_values": "x"}], [{"image": 1, "labels": 0}], {"day": TEST}])
    def test_a_dataset_without_images_has_a_card_too(self, tmp_path, tiny_vit, items):
        trainer = finished(tmp_path, tiny_vit)
        trainer.eval_dataset = items
        assert "wrong_images.png" not in card_of(trainer).text


@pytest.mark.parametrize(("kind", "side"), [("timm", None), ("timm", 48), ("transformers", 48), ("timm", 32)])
def test_images_of_another_size_than_the_saved_processors_are_told(tmp_path, tiny_vit, caplog, kind, side):
    """The images have 32 pixels a side; without a processor, timm's config says 160."""
    trainer = trainer_of(tmp_path, timm_resnet() if kind == "timm" else tiny_vit)
    trainer.processing_class = side and ViTImageProcessor(size={"height": side, "width": side})
    trainer.evaluate()
    text, fits = card_of(trainer).text, side == 32
    assert ("pipeline(" in text) == ("create_transform" in text) == fits
    assert ("prepare images as in training" in text.lower()) == (not fits)
    assert (f"are 32 × 32 px, and the image processor that is saved gives {side or 160}" in caplog.text) == (not fits)


def test_the_training_is_told(tmp_path, tiny_vit):
    text = card_of(finished(tmp_path, tiny_vit, weight_decay=0.05)).text
    for row in (
        r"\| training images \| 48 \|",
        r"\| image size \| 32 × 32 px \|",
        r"\| hardware \| 1 × CPU, \d+ cores \|",
        r"\| duration \| [\d a-z]+ \|",
        r"\| `optimizer` \| AdamW, betas \(0.9, 0.999\), eps 1e-08, weight_decay 0.05 \|",
    ):
        assert re.search(row, text), row
    assert "OptimizerNames" not in text
    assert "augmentation" not in text


class TestNoiseOfTheUsualHead:
    def share(self, trainer, key):
        return next((entry[key] for entry in trainer.state.log_history if key in entry), None)

    @pytest.mark.parametrize("method", ["entame", "keep"])
    def test_is_what_base_measures_on_the_same_batch(self, tmp_path, tiny_vit, method):
        base = trainer_of(tmp_path, copy.deepcopy(tiny_vit), entame_method="base", max_steps=1)
        base.train()
        trainer = trainer_of(tmp_path, tiny_vit, entame_method=method, max_steps=1)
        trainer.train()
        expected = self.share(base, "energy/noise_share")
        assert self.share(trainer, "energy/base_noise_share") == pytest.approx(expected, rel=1e-4)
        assert self.share(trainer, "energy/noise_share") != pytest.approx(expected, rel=0.1)
        assert ("entame" in card_of(trainer).data.tags) == (method == "entame")
        assert f"with a head drawn from N(0, 2/C), it is {expected:.1%}" in card_of(trainer).text

    def test_is_kept_when_a_run_goes_on(self, tmp_path, tiny_vit):
        saved = {"save_strategy": "steps", "save_steps": 2}
        first = finished(tmp_path, copy.deepcopy(tiny_vit), **saved)
        second = trainer_of(tmp_path, tiny_vit, **saved)
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert self.share(second, "energy/base_noise_share") == self.share(first, "energy/base_noise_share")

    @pytest.mark.parametrize("change", [{"energy_logging_steps": 0}, {"label_smoothing_factor": 0.1}], ids=str)
    def test_is_left_out_where_it_cannot_be_compared(self, tmp_path, tiny_vit, change):
        trainer = trainer_of(tmp_path, tiny_vit, **change)
        trainer.train()
        assert self.share(trainer, "energy/base_noise_share") is None
        assert not tiny_vit.classifier._forward_pre_hooks


class TestSources:
    def test_ids_and_licenses_are_linked(self, tmp_path, tiny_vit):
        trainer = trainer_of(tmp_path, tiny_vit, max_steps=1, eval_steps=1, energy_logging_steps=0)
        trainer.train()
        options = {"finetuned_from": "me/base", "dataset_tags": "uoft-cs/cifar10", "license": "mit", "tags": "birds"}
        card = card_of(trainer, **options, language="tr", model_name="finches")
        data = card.data
        assert (data.base_model, data.base_model_relation, data.datasets) == (
            "me/base",
            "finetune",
            ["uoft-cs/cifar10"],
        )
        assert (data.license, data.language, data.metrics) == ("mit", "tr", ["accuracy", "f1"])
        assert {"birds", "entame", "generated_from_trainer"} <= set(data.tags)
        assert data.eval_results[0].dataset_type == "uoft-cs/cifar10"
        assert data.model_name == "finches"
        assert "(https://huggingface.co/datasets/uoft-cs/cifar10)" in card.text

    def test_no_path_and_no_token_ends_in_the_card(self, tmp_path, tiny_vit):
        tiny_vit.save_pretrained(tmp_path / "my-base")
        model = AutoModelForImageClassification.from_pretrained(tmp_path / "my-base")
        trainer = trainer_of(tmp_path / "out", model, hub_token="hf_secret", max_steps=1)
        trainer.train()
        card = card_of(trainer, dataset_tags=str(tmp_path / "photos"), dataset=str(tmp_path / "more"))
        for private in (str(tmp_path), tmp_path.name, "hf_secret"):
            assert private not in card.content
        assert "my-base" in card.text
        assert "photos" in card.text
        assert (card.data.base_model, card.data.datasets) == (None, None)


@pytest.mark.parametrize("keys", [int, str], ids=["int", "str"])
def test_classes_are_listed_in_the_order_of_their_numbers(tmp_path, keys):
    """Whatever type the keys have, and from ten classes on: as text, 10 stands before 2."""
    model = as_transformers(timm.create_model("test_resnet", num_classes=12))
    model.config.id2label = {keys(index): f"class-{index}" for index in sorted(range(12), key=str)}
    trainer = trainer_of(tmp_path, model, max_steps=1)
    trainer.train_dataset = trainer.eval_dataset = RandomImages(48, classes=12)
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    expected = [f"class-{index}" for index in range(12)]
    listed = re.findall(r"^\| \d+ \| (class-\d+)", card_of(trainer).text, re.MULTILINE)
    assert listed == expected
    saved = AutoModelForImageClassification.from_pretrained(tmp_path).config
    assert [saved.id2label[index] for index in range(12)] == expected
    assert json.loads((tmp_path / "config.json").read_text())["label_names"] == expected


class TestWriting:
    def test_what_people_wrote_stays(self, tmp_path, tiny_vit):
        trainer = trainer_of(tmp_path, tiny_vit)
        trainer.create_model_card()
        file = tmp_path / "README.md"
        file.write_text(file.read_text() + "\nTaken in my garden.\n")
        trainer.evaluate()
        trainer.create_model_card()
        assert file.read_text().endswith("\nTaken in my garden.\n")

    def test_options_of_the_trainer_and_of_the_call(self, tmp_path, tiny_vit):
        trainer = trainer_of(tmp_path, tiny_vit)
        trainer.card_options = {"dataset_tags": "uoft-cs/cifar10", "license": "mit"}
        trainer.create_model_card(license="cc0-1.0")
        data = ModelCard.load(tmp_path / "README.md").data
        assert (data.datasets, data.license) == (["uoft-cs/cifar10"], "cc0-1.0")

    def test_a_card_that_cannot_be_written_costs_no_training(self, tmp_path, tiny_vit, caplog):
        trainer = trainer_of(tmp_path, tiny_vit)
        tmp_path.joinpath("README.md").write_text("---\na: [\n---\nMine.\n")
        trainer.create_model_card()
        assert "The model card was not written" in caplog.text
        assert (tmp_path / "README.md").read_text().endswith("Mine.\n")
        with pytest.raises(InputError):
            write_card(trainer)

    @pytest.mark.parametrize("name", ["freeze_backbone", "freeze_statistics"])
    def test_frozen_parts_are_told(self, tmp_path, name):
        card = card_of(finished(tmp_path / "frozen", timm_resnet(), **{name: True}))
        assert f"| `{name}` | True |" in card.text
        assert f"`{name}`" not in card_of(finished(tmp_path / "free", timm_resnet())).text

    def test_a_recipes_schedule_is_told(self, tmp_path):
        card = card_of(finished(tmp_path, timm_resnet(), recipe="recommended"))
        assert "| `lr_scheduler_type` | warmup_stable_decay |" in card.text
        assert re.search(r"\| `lr_scheduler_kwargs` \| .*'num_decay_steps': 0.2", card.text)

    def test_one_process_writes(self, tmp_path, tiny_vit, monkeypatch):
        trainer = trainer_of(tmp_path, tiny_vit)
        monkeypatch.setattr(trainer, "is_world_process_zero", lambda: False)
        trainer.create_model_card()
        assert not (tmp_path / "README.md").exists()

    def test_an_adapted_model_that_was_only_evaluated_tells_its_record(self, tmp_path, tiny_vit):
        finished(tmp_path / "first", tiny_vit, phi_w=1e-10)
        model = AutoModelForImageClassification.from_pretrained(tmp_path / "first")
        trainer = trainer_of(tmp_path / "second", model)
        trainer.evaluate()
        card = card_of(trainer)
        assert "| variance of the head's first weights, φ_w | 1e-10 |" in card.text
        assert "hyper-parameter" not in card.text
        assert "optimizer step" not in card.text
        assert card.data.eval_results

    def test_a_model_of_ones_own(self, tmp_path):
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.end = nn.Linear(3, 8), nn.Linear(8, 10)

            def forward(self, pixel_values, labels=None):
                logits = self.end(self.body(pixel_values.mean((2, 3))).relu())
                return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

        trainer = finished(tmp_path, Own(), entame=EntameConfig(head="end"))
        card = card_of(trainer)
        assert card.text.count("```") == 2
        assert "Own, fine-tuned to tell 10 classes" in card.text
        assert card.data.library_name is None
