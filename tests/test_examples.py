"""The examples in the docstrings import what is there."""

import doctest
import importlib
import pkgutil

import pytest

import entame_hf

PACKAGE = "entame_hf"
MODULES = [module.name for module in pkgutil.walk_packages(entame_hf.__path__, f"{PACKAGE}.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_examples_import_what_is_there(name):
    for docstring in doctest.DocTestFinder().find(importlib.import_module(name), name):
        for example in docstring.examples:
            if example.source.startswith(f"from {PACKAGE}"):
                exec(example.source, {})


def test_every_public_name_is_there():
    assert all(getattr(entame_hf, name).__module__.startswith(PACKAGE) for name in entame_hf.__all__)
