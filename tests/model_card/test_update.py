"""What people write into a card stays there, and what is generated is renewed."""

import pytest
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modelcard import TrainingSummary

from entame_hf import InputError
from entame_hf.model_card.update import metadata_comment, update_card

BEGIN = "<!-- entame:begin. The next save rewrites this part. -->"

END = "<!-- entame:end -->"


def card(text="# Birds", accuracy=0.9, **data):
    result = EvalResult("image-classification", "birds", "Birds", "accuracy", accuracy)
    defaults = {"license": "mit", "tags": ["entame"], "model_name": "birds", "eval_results": [result]}
    values = ModelCardData(**{**defaults, **data})
    comment = metadata_comment(values.to_dict())
    return f"---\n{values.to_yaml()}\n---\n{BEGIN}\n{comment}\n\n{text.strip()}\n\n{END}\n"


def metadata(content):
    return ModelCard(content).data.to_dict()


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
# Words, pieces of cards, both kinds of line ends, marks without their other half.
texts = st.lists(
    st.one_of(words, st.sampled_from(["\n", "\r\n", "# Title\n", BEGIN, END, "---\n", card("# Old", 0.1)])), max_size=6
).map("".join)
values = st.dictionaries(
    st.sampled_from(["license", "tags", "language", "note"]),
    st.one_of(words, st.lists(words, max_size=3), st.booleans(), st.integers()),
    max_size=3,
)


def existing_card(data, text):
    return f"---\n{yaml.safe_dump(data)}---\n{text}" if data else text


@settings(deadline=None, max_examples=100)
@given(values, texts, words)
def test_updating_twice_equals_updating_once(data, text, new):
    generated = card(new.replace("<", "&lt;"))
    try:
        once = update_card(existing_card(data, text), generated)
    except InputError:
        return
    assert update_card(once, generated) == once
    assert yaml.safe_load(REGEX_YAML_BLOCK.search(once)[2])["model-index"] == metadata(generated)["model-index"]


@settings(deadline=None, max_examples=50)
# A "\r" before a line's end would be a part of it.
@given(*[words.filter(lambda text: "\r" not in text)] * 3, st.sampled_from(["\n", "\r\n"]))
def test_words_around_the_generated_part_stay(before, after, new, line_break):
    first = card().replace("\n", line_break)
    edited = first.replace(BEGIN, before + BEGIN).replace(END, END + after)
    updated = update_card(edited, card("# New " + new.replace("<", "&lt;")))
    assert ("\r\n" in updated) == (line_break == "\r\n")
    before, after, updated = (text.replace("\r\n", "\n") for text in (before, after, updated))
    assert updated.split("---\n", 2)[2].startswith(before + BEGIN)
    assert updated.endswith(f"{END}{after}\n")
    assert "# New" in updated
    assert "# Birds" not in updated


def test_words_after_a_lost_mark_stay():
    edited = card().replace(END, "") + "\nMy words.\n"
    updated = update_card(update_card(edited, card("# New")), card("# Newer"))
    assert "My words." in updated
    assert "# Newer" in updated


@pytest.mark.parametrize(
    ("edit", "again", "expected"),
    [
        ({"license": "cc0-1.0"}, {"license": "apache-2.0"}, {"license": "cc0-1.0"}),
        ({}, {"license": "apache-2.0"}, {"license": "apache-2.0"}),
        ({}, {"license": None}, {"license": None}),
        ({"license": None}, {"license": "apache-2.0"}, {"license": None}),
        ({"language": "tr"}, {}, {"language": "tr", "license": "mit"}),
        ({"tags": ["entame", "birds"]}, {"tags": ["entame", "timm"]}, {"tags": ["entame", "birds"]}),
        ({"tags": ["birds"]}, {"tags": ["entame", "timm"]}, {"tags": ["birds"]}),
        ({}, {"tags": ["timm"]}, {"tags": ["timm"]}),
        ({"base_model": "mine/own"}, {"base_model": "timm/resnet18"}, {"base_model": "mine/own"}),
    ],
    ids=["changed", "renewed", "gone", "removed", "added", "tag-added", "tag-removed", "tag-gone", "set-by-hand"],
)
def test_metadata_that_people_changed_stay(edit, again, expected):
    existing = ModelCard(card())
    for key, value in edit.items():
        existing.data[key] = value
    updated = metadata(update_card(existing.content, card(**again)))
    assert {key: updated.get(key) for key in expected} == expected


def test_numbers_are_those_of_the_new_model():
    edited = card(accuracy=0.5) + "\nMine.\n"
    assert (
        metadata(update_card(edited, card(accuracy=0.7)))["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.7
    )
    assert "model-index" not in metadata(update_card(edited, card(eval_results=None)))


def test_metadata_that_stay_keep_their_comments():
    edited = card().replace("license: mit", "license: mit  # as the lab's lawyer says")
    assert "the lab's lawyer" in update_card(edited, card("# New"))


def test_a_card_without_marks_stays_in_front():
    updated = update_card("---\nlicense: cc0-1.0\nlanguage: tr\n---\n# My birds\n\nBy hand.\n", card())
    assert updated.index("# My birds\n\nBy hand.\n") < updated.index(BEGIN)
    assert metadata(updated)["license"] == "cc0-1.0"
    assert metadata(updated)["language"] == "tr"


def test_trainers_own_card_is_replaced_unless_someone_completed_it():
    trainers = TrainingSummary("birds", license="cc0-1.0", tags="generated_from_trainer").to_model_card()
    assert update_card(trainers, card()).count("# ") == card().count("# ")
    completed = trainers.replace("## Model description\n\nMore information needed", "## Model description\n\nFinches.")
    assert "Finches." in update_card(completed, card())


@pytest.mark.parametrize("broken", ["---\na: [\n---\n", "---\nwords\n---\n", "---\nwhen: 2024-13-45\n---\n"])
def test_metadata_that_cannot_be_read_are_not_thrown_away(broken):
    with pytest.raises(InputError, match="between its ---"):
        update_card(broken, card())


@pytest.mark.parametrize("nothing", [None, "", " \n"])
def test_no_card(nothing):
    assert update_card(nothing, card()) == card()
    assert ModelCard(card()).data.eval_results[0].metric_value == 0.9


def test_dashes_do_not_end_the_comment_of_the_metadata():
    generated = card(base_model="me/a--><b>--")
    assert generated.split("entame:metadata")[1].count("-->") == 2
    assert update_card(generated, generated) == generated
