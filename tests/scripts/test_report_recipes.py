"""Recipes that measure the head's rate, beside methods that do not."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from reproduction.recipes import (
    KEEP,
    RECIPE,
    behind_table,
    counts_table,
    leading,
    leads_table,
    recipes_of,
    standings_figure,
)
from reproduction.report import write_report
from scipy import stats
from test_report import line, write

AUTO = {"settings": {"head_lr": "auto"}, "head_lr": 1e-3}
# Over seeds; the last two measure.
FINALS = {
    "keep": [0.8, 0.82, 0.81],
    "MEI x10": [0.9, 0.91, 0.9],
    "other": [0.95, 0.95, 0.94],
    "recommended": [0.91, 0.92, 0.92],
}
RECIPES = ("other", "recommended")


def lines_of(methods, model="M", finals=lambda accuracy: accuracy, **more):
    return [
        line(method, seed, model=model, final=finals(accuracy), **more, **(AUTO if method in RECIPES else {}))
        for method in methods
        for seed, accuracy in enumerate(FINALS[method])
    ]


@pytest.fixture
def cells(group):
    """In one the recipe is ahead, in one as far behind."""
    methods = ("keep", "MEI x10", "recommended")
    return [group(lines_of(methods) + lines_of(methods, "N", lambda accuracy: 1.7 - accuracy))]


def test_a_recipe_is_compared_with_the_best_of_the_others(cells):
    assert counts_table(cells).splitlines()[2] == "| recommended | 1 of 2 | **1 of 2** | 85.0 | 20.0 |"
    table = behind_table(cells, "recommended")
    assert "| N, D: keep −10.7 ± " in table
    # Differences of 11, 10, 11, −11, −10 and −11 points, and so of two cells.
    assert "| keep | +0.0 (2) |" in leads_table(cells, "recommended")


def test_recipes_are_not_compared_with_each_other(group):
    groups = [group(lines_of(FINALS))]
    assert recipes_of(groups) == ["other", "recommended"]
    # Behind the other recipe by 3 points, and ahead of what measures nothing.
    assert [row.split(" | ")[2] for row in counts_table(groups).splitlines()[2:]] == ["**1 of 1**"] * 2
    assert "| none |" in behind_table(groups, "recommended")


def test_the_recipe_that_leads_is_tested_against_all_others(group):
    groups = [group(lines_of(FINALS))]
    assert leading(groups) == "other"
    assert "| recommended | +3.0 (1) |" in leads_table(groups, "other")


@pytest.mark.parametrize("methods", [["keep", "MEI x10"], ["recommended"]], ids=["no-recipe", "nothing-beside-it"])
def test_nothing_is_said_where_there_is_nothing_to_compare(group, methods):
    groups = [group(lines_of(methods))]
    assert recipes_of(groups) == []
    assert counts_table(groups) == ""


def test_seeds_are_no_evidence_for_other_cells(group):
    gains = {"A": 0.02, "B": 0.0, "C": 0.01}
    lines = [
        line(method, seed, dataset=dataset, final=0.8 + ours * (gain + 0.002 * (seed % 2)), **(AUTO if ours else {}))
        for dataset, gain in gains.items()
        for method, ours in (("recommended", True), ("keep", False))
        for seed in range(8)
    ]
    # 24 pairs of runs would say p = 2e-6.
    p = stats.ttest_1samp([2.1, 0.1, 1.1], 0).pvalue
    assert f"| +1.1 ± 2.5, p = {p:.2g} (3) |" in leads_table([group(lines)], "recommended")


def test_the_picture_has_a_row_a_cell_and_a_panel_a_setting(cells):
    figure = standings_figure([*cells, *cells], "recommended")
    first, second = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["M, D", "N, D"]
    for axes in (first, second):
        points = [(mark.get_xydata()[0].round(1).tolist(), to_hex(mark.get_color())) for mark in axes.get_lines()]
        assert ([91.7, 0.0], RECIPE.lower()) in points
        assert ([81.0, 0.0], KEEP) in points
        assert ([78.3, 1.0], RECIPE.lower()) in points
        # The first row at the top, and no marker on the edge.
        assert axes.get_ylim() == (1.5, -0.5)


def test_a_report_of_a_recipe_leads_with_it(tmp_path):
    lines = [each for rate in (1e-3, 1e-4) for each in lines_of(("keep", "MEI x10", "recommended"))]
    for place, each in enumerate(lines):
        each["settings"] = {**each["settings"], "learning_rate": (1e-3, 1e-4)[place // 9]}
    page, *pictures = write_report([write(lines, tmp_path / "lines")], tmp_path / "out")
    assert [picture.name for picture in pictures] == ["overview.png"]
    text = page.read_text()
    assert "| recommended | 1 of 1 | 1 of 1 | **2 of 2** |" in text
    # The paper's method is no part of it.
    assert "held against" not in text


def test_of_several_recipes_the_one_that_leads_is_shown(tmp_path):
    page, *pictures = write_report([write(lines_of(FINALS), tmp_path / "lines")], tmp_path / "out")
    assert [picture.name for picture in pictures] == ["overview.png"]
    text = page.read_text()
    assert text.count("**1 of 1**") == 2
    assert "Where other is behind" in text
