"""README and docs: no option described twice, no word of the left column, no link that leads nowhere."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import pytest

from entame_hf.cli.arguments import ModelArguments, RunArguments
from entame_hf.cli.data_arguments import DataArguments
from entame_hf.cli.predict import PredictArguments
from entame_hf.cli.ranking import RankingArguments

ROOT = Path(__file__).parents[1]
FILES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.[mi]*")))]

FILLERS = re.findall(
    r"\w+",
    """a an and are as at be by default defaults done each every for from if in is it its many most no not of on
one or so than that the they this to what where which with""",
)

# Words that have a better one: resume, freeze, dataset, resize, rank, worker, head learning rate, sharded, incomplete.
UNWANTED = r"""go(es|ing)? on from|stands? still|data sets?|squash\w*|process(es)? of (its|their) own|goes? before
process(es)? that helps?|rates? of the head|head rates?|partitioned|cut-off|left open|what (it|they) came with|told to
whole (models?|checkpoints?)|what going on|in shares of|no thread of its own|count alike|nobody has heard|unusable
none of which""".replace("\n", "|")


def prose(file: str) -> str:
    """Give the text of a document without its code."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file.endswith(".ipynb"):
        text = "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def blocks(text: str) -> list[str]:
    """Split a text into paragraphs, items of lists and rows of tables."""
    return re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\|))", text)


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.;:])\s+|\s*\|\s*", text) if part.strip()]


def stems(text: str) -> list[str]:
    """List the words that say something, without endings."""
    words = re.findall(r"[a-zα-ω][a-zα-ω_]*", re.sub(r"['’]s\b", "", text.lower()))
    return [re.sub(r"(?<=\w{3})(ing|ed|es|e|s)$", "", word) for word in words if word not in FILLERS]


@cache
def help_lines() -> list[tuple[str, str, list[str]]]:
    """List the sentences of all help texts: the option's name, the sentence, its stems."""
    kinds = (ModelArguments, DataArguments, RunArguments, PredictArguments, RankingArguments)
    texts = {f.name: str(f.metadata.get("help", "")) for kind in kinds for f in fields(kind)}
    return [(name, line, stems(line)) for name, text in texts.items() for line in sentences(text)]


def repeated(text: str) -> list[str]:
    """List the help texts that a document repeats: copies, and most of their words beside the option's name."""
    found = []
    for block in blocks(text):
        named = set(re.findall(r"[a-z]\w+", block))
        for sentence in sentences(block):
            said = stems(sentence)
            for name, line, words in help_lines():
                left = set(words) - {*stems(name)}
                common = len(left & set(said))
                is_copy = common >= 3 and SequenceMatcher(None, words, said, autojunk=False).ratio() >= 0.8
                if is_copy or (name in named and common >= max(3, 0.6 * len(left))):
                    found.append(f"{name}: {' '.join(sentence.split())!r} repeats {line!r}")
    return found


@pytest.mark.parametrize("file", FILES)
def test_no_option_is_described_twice(file):
    assert not repeated(prose(file))


@pytest.mark.parametrize(
    "text",
    [
        "Checkpoints stay float32.",
        "`--images_per_class N` | N training images of each class at most",
        "Set `freeze_backbone` for linear probing: it freezes the backbone and trains only the heads.",
        "- `--patience 3` stops after three evaluations without an improvement.",
    ],
)
def test_a_copy_of_a_help_text_is_found(text):
    assert repeated(text)


@pytest.mark.parametrize("file", [*FILES, "CHANGELOG.md", "CONTRIBUTING.md"])
def test_documents_use_the_words_of_the_field(file):
    text = " ".join(prose(file).split())
    assert not [found.group() for found in re.finditer(rf"\b({UNWANTED})\b", text, re.IGNORECASE)]


@pytest.mark.parametrize("file", [*FILES, "CONTRIBUTING.md"])
def test_every_link_leads_to_a_file_and_a_heading(file):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", prose(file)):
        place = (ROOT / file).parent / target if target else ROOT / file
        assert place.exists(), target
        headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings], anchor


def test_the_readme_is_short_and_starts_with_what_to_type():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert {"make demo", "make test"} <= {line.split("  #")[0].strip() for line in lines[:40]}
