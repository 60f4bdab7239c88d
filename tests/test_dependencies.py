"""Every library that the code imports is a declared dependency."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OWN = {"entame_hf", *(path.stem for path in (ROOT / "scripts").iterdir())}


def normal(name):
    return re.match(r"[\w.-]+", name)[0].lower().replace("_", "-").replace(".", "-")


def imported(folder, at_import):
    """Return (library, file) of the imports that run when a module is imported, or of those inside functions."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inner = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(tree):
            if (id(node) in inner) is at_import:
                continue
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for library in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - OWN:
                yield library, file.relative_to(ROOT)


@pytest.mark.parametrize(
    ("folder", "at_import", "extras"),
    [
        ("entame_hf", True, []),
        ("entame_hf", False, [*EXTRAS]),
        ("scripts", True, ["demo", "reproduce"]),
        ("scripts", False, [*EXTRAS]),
    ],
)
def test_imports_are_declared(folder, at_import, extras):
    requirements = [*PROJECT["dependencies"], *(each for extra in extras for each in EXTRAS[extra])]
    declared = {normal(requirement) for requirement in requirements}
    distributions = packages_distributions()
    missing = {
        f"{file} imports {library}"
        for library, file in imported(folder, at_import)
        if declared.isdisjoint(map(normal, distributions.get(library, [library])))
    }
    assert not missing
