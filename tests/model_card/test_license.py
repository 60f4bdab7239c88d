"""Ids on the Hub, and the license in a base model's card."""

import pytest
import yaml
from huggingface_hub import ModelCard

from entame_hf.model_card import is_hub_id, license_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("timm/resnet50.a1_in1k", True),
        ("gpt2", True),
        ("/a/b", False),
        ("a/b/c", False),
        ("", False),
        (None, False),
    ],
)
def test_ids_on_the_hub(name, expected):
    assert is_hub_id(name) == expected


def test_ids_that_are_folders_here_are_none(tmp_path, monkeypatch):
    (tmp_path / "timm" / "resnet50.a1_in1k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("timm/resnet50.a1_in1k")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("license: apache-2.0", {"license": "apache-2.0"}),
        (
            "license: other\nlicense_name: ours\nlicense_link: https://a.b/c",
            {"license": "other", "license_name": "ours", "license_link": "https://a.b/c"},
        ),
        ("license: other\nlicense_link: LICENSE", {"license": "other"}),
        ("tags: [a]", {}),
        ("license: [", {}),
    ],
    ids=["named", "linked", "linked-locally", "unknown", "broken"],
)
def test_the_license_is_the_base_models(tmp_path, metadata, expected):
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n# Base\n")
    found = license_of(str(tmp_path))
    assert {key: value for key, value in found.items() if key.startswith("license") and value} == expected


def test_an_unreachable_base_has_no_license():
    assert license_of("nobody/no-such-model") == {}
    assert license_of(None) == {}


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("javascript:alert(1)", None),
        ("JaVaScRiPt:alert(1)", None),
        ("java\nscript:alert(1)", None),
        ("\x01javascript:alert(1)", None),
        ("data:text/html,<script>", None),
        ("ftp://a.b/c", None),
        ("//a.b/c", None),
        ("https:", None),
        ("http://[", "http://%5B"),
        (3, None),
        ("HTTP://a.b/c", "HTTP://a.b/c"),
        ("https://a.b/c) <b> [x](javascript:1)", "https://a.b/c%29%20%3Cb%3E%20%5Bx%5D%28javascript:1%29"),
        ("https://a.b/许可?x=1#y", "https://a.b/%E8%AE%B8%E5%8F%AF?x=1#y"),
    ],
    ids=repr,
)
def test_a_license_links_to_the_web_alone(tmp_path, link, expected):
    metadata = yaml.safe_dump({"license": "other", "license_link": link}, allow_unicode=True)
    (tmp_path / "README.md").write_text(f"---\n{metadata}---\n# Base\n")
    assert license_of(str(tmp_path)).get("license_link") == expected


def test_a_link_to_a_file_of_the_repository_is_completed(monkeypatch):
    card = ModelCard("---\nlicense: other\nlicense_link: LICENSE\n---\n")
    monkeypatch.setattr(ModelCard, "load", lambda *args, **kwargs: card)
    assert license_of("me/linked")["license_link"] == "https://huggingface.co/me/linked/blob/main/LICENSE"
