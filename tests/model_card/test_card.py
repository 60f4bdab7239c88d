"""What a card says of the facts it is given."""

import json
import re
import unicodedata

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from entame_hf.metrics import Evaluation, evaluation_metrics
from entame_hf.model_card import CardFacts, render_card, write_model_card


def facts(names, confusion=None, **changes):
    defaults = {"name": "finches", "repository": "me/finches", "architecture": "resnet18"}
    defaults |= {"library_name": "timm", "has_processor": True}
    defaults |= {"evaluation": Evaluation({"accuracy": 0.5}, 3, confusion)}
    return CardFacts(class_names=names, **{**defaults, **changes})


def test_names_in_any_script_stay_in_their_cells():
    names = ["a|b", "line\nbreak", "<!-- entame:end -->", "[x](y)", "**bold**", "$x$", "`code`", "{{ 7 * 7 }}"]
    names += ["esc\x1b[2J", "nul\0", "byte\udcff", "\u202egnp.x", "\u2028", "<img src=x onerror=alert(1)>"]
    names += ["猫", "a_b", "می\u200cخواهم"]
    hostile = "x\n# |<b>\x1b\udcff"
    text = render_card(facts(names, np.eye(len(names), dtype=int), name=hostile, dataset_name=hostile, tags=[hostile]))
    rows = [line for line in text.split("\n") if re.match(r"\| \d", line)]
    assert len(rows) == len(names)
    assert all(row.count("|") == 7 for row in rows)
    assert text.count("<!--") == 3
    assert not re.search("<img|<b>", text.split(" -->", 2)[2])
    assert {c for c in text if unicodedata.category(c) in ("Cc", "Cs")} == {"\n"}
    assert "49" not in text
    for name in names[-3:]:
        assert f"| {name} |" in text
    assert text.encode()


@pytest.mark.parametrize(("classes", "rows", "folded"), [(10, 10, 0), (11, 11, 1), (100, 100, 1), (1000, 50, 1)])
def test_many_classes_are_folded_away_and_very_many_cut(classes, rows, folded):
    confusion = np.diag(np.arange(classes) + 1)
    # Two classes that are wrong more often than right, and one without examples.
    confusion[3] = np.roll(confusion[3] * 5, 1)
    confusion[0, 0] = 0
    text = render_card(facts([f"class {i}" for i in range(classes)], confusion))
    listed = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert (len(listed), text.count("<details>")) == (rows, folded)
    assert "3" in listed
    assert ("0" in listed) == (classes <= 100)
    assert len(text) < 25_000


def test_a_pushed_model_is_loaded_by_its_id():
    text = render_card(facts(["a", "b"]))
    assert 'pipeline("image-classification", model="me/finches")' in text
    assert 'timm.create_model("hf-hub:me/finches", pretrained=True)' in text
    assert "local-dir" not in text


def test_unknown_facts_are_left_out():
    text = render_card(CardFacts("finches", "resnet18", ["a", "b"], Evaluation({})))
    assert re.findall("^## .*", text, re.MULTILINE) == ["## Citation"]
    for missing in ("None", "Undefined", "nan"):
        assert missing not in text


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), np.array(0.5), torch.tensor(0.5)], ids=repr)
def test_the_model_index_has_plain_numbers(value):
    metrics = evaluation_metrics({"eval_accuracy": value, "eval_per_class": np.ones(3), "eval_name": "x", "step": 1})
    text = render_card(facts(["a", "b"], evaluation=Evaluation(metrics)))
    assert ModelCard(text).data.eval_results[0].metric_value == 0.5
    assert metrics == {"accuracy": 0.5}
    assert "python/object" not in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_model_index_has_finite_numbers(value):
    """The Hub takes no others."""
    evaluation = Evaluation({"accuracy": value, "loss": value, "f1_macro": 0.5})
    data = ModelCard(render_card(facts(["a", "b"], evaluation=evaluation))).data
    assert json.loads(json.dumps(data.to_dict(), allow_nan=False))["metrics"] == ["f1"]


def test_the_training_is_told():
    training = {"recipe": "recommended", "training images": 4000, "image size": None, "hardware": "1 × H|200"}
    adaptation = {"method": "keep", "init": "keep", "feature_norm": False, "learning_rate": 1e-4, "versions": {}}
    changes = {"hyperparameters": {"optimizer": "AdamW"}, "probe_accuracy": 0.913, "pictures": ["batch.png"]}
    text = render_card(facts(["a", "b"], training=training, adaptation=adaptation, **changes))
    for row in ("| recipe | recommended |", "| training images | 4,000 |", "| hardware | 1 × H&#124;200 |"):
        assert row in text
    assert "image size" not in text
    assert "| `optimizer` | AdamW |" in text
    assert "91.3%" in text
    assert "](batch.png)" in text
    assert "](wrong_images.png)" not in text


def test_the_widget_shows_examples():
    data = ModelCard(render_card(facts(["a", "b"], examples={"example_1.png": "a|b"}))).data
    assert data.widget == [{"src": "example_1.png", "example_title": "a|b"}]


def test_a_folder_s_card_keeps_what_people_wrote(tmp_path):
    write_model_card(tmp_path, facts(["a", "b"]))
    file = tmp_path / "README.md"
    file.write_text(file.read_text() + "\nTaken in my garden.\n")
    write_model_card(tmp_path, facts(["a", "b", "c"]))
    assert file.read_text().endswith("\nTaken in my garden.\n")
    assert "tell 3 classes" in file.read_text()


def test_a_card_is_html_without_a_trace_of_the_template():
    names = [f"class {i}" for i in range(12)]
    record = {"method": "entame", "init": "mei", "feature_norm": True, "momentum": 1.0, "phi_w": 1e-12}
    record |= {"learning_rate": 1e-4, "num_labels": 12, "head_lr": None, "versions": {"torch": "2.14"}}
    text = render_card(facts(names, np.eye(12, dtype=int), adaptation=record, license={"license": "mit"}))
    assert not re.search(r"\{%|\{\{|%\}|\}\}|\n\n\n", text.split("```bibtex")[0])


@pytest.mark.parametrize("converts", [False, True])
def test_images_that_pipeline_reads_otherwise_are_told(converts):
    assert ("laid over white" in render_card(facts(["a", "b"], converts_images=converts))) == converts


def test_test_images_come_first_and_the_split_is_named():
    evaluation = Evaluation(
        {"accuracy": 1.0, "loss": 0.1}, 3, np.eye(2, dtype=int) * 9, None, "validation", {"accuracy": 0.25}
    )
    text = render_card(facts(["a", "b"], evaluation=evaluation))
    assert "Evaluated on 18 validation images, after optimizer step 3. Test images chose nothing:" in text
    assert "| metric | test | validation |\n| --- | --- | --- |\n| accuracy | 0.25 | 1 |\n| loss |  | 0.1 |" in text
    assert "What follows is about the validation images." in text
    results = ModelCard(text).data.eval_results
    assert [(each.dataset_split, each.metric_value) for each in results] == [("test", 0.25), ("validation", 1.0)]


def test_without_test_images_or_a_split():
    text = render_card(facts(["a", "b"], np.eye(2, dtype=int)))
    assert "Evaluated on 2 images, after optimizer step 3:\n\n| metric | value |\n| --- | --- |\n" in text
    assert ModelCard(text).data.eval_results[0].dataset_split is None
