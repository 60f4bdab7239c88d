"""The report's tables of recipes, which measure the head learning rate, beside methods that do not."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_hex
from reproduction.recipes import (
    FAIR,
    FAIR_COLOUR,
    FAIR_LABEL,
    KEEP,
    RECIPE,
    behind_table,
    counts_table,
    leading,
    leads_table,
    means_table,
    own_best_table,
    recipes_of,
    standings_figure,
)
from reproduction.report import write_report
from sample_rows import entries, group, row, write
from scipy import stats

pytestmark = pytest.mark.reproduction
AUTO = {"settings": {"head_lr": "auto"}, "head_lr": 1e-3}
# Over seeds; the last two measure.
FINALS = {
    "keep": [0.8, 0.82, 0.81],
    "MEI x10": [0.9, 0.91, 0.9],
    "other": [0.95, 0.95, 0.94],
    "recommended": [0.91, 0.92, 0.92],
}
RECIPES = ("other", "recommended")


def rows_of(methods, model="M", finals=lambda accuracy: accuracy, **more):
    return [
        row(method, seed, model=model, final=finals(accuracy), **more, **(AUTO if method in RECIPES else {}))
        for method in methods
        for seed, accuracy in enumerate(FINALS[method])
    ]


@pytest.fixture
def groups():
    """The recipe is ahead on one combination, and as far behind on another."""
    methods = ("keep", "MEI x10", "recommended")
    return [group(rows_of(methods) + rows_of(methods, "N", lambda accuracy: 1.7 - accuracy))]


def test_recipe_is_compared_with_the_best_of_the_others(groups):
    assert entries(counts_table(groups))["recommended"] == ["1 of 2", "**1 of 2**", "85.0", "20.0"]
    assert "| N, D: keep −10.7 ± " in behind_table(groups, "recommended")
    # Differences of 11, 10, 11, −11, −10 and −11 points, on two combinations.
    assert entries(leads_table(groups, "recommended"))["keep"] == ["+0.0, median +0.0 (2)"]
    assert entries(means_table(groups))["keep"] == ["20.0, 85.0"]


def test_recipes_are_not_compared_with_each_other():
    found = [group(rows_of(FINALS))]
    assert recipes_of(found) == ["other", "recommended"]
    assert [each.split(" | ")[2] for each in counts_table(found).splitlines()[2:]] == ["**1 of 1**"] * 2
    assert "| none |" in behind_table(found, "recommended")
    assert leading(found) == "other"
    assert "| recommended | +3.0, median +3.0 (1) |" in leads_table(found, "other")


@pytest.mark.parametrize("methods", [["keep", "MEI x10"], ["recommended"]], ids=["no-recipe", "no-peer"])
def test_recipe_needs_a_peer(methods):
    assert recipes_of([group(rows_of(methods))]) == []


def test_more_seeds_are_no_evidence_for_other_combinations():
    gains = {"A": 0.02, "B": 0.0, "C": 0.01}
    rows = [
        row(method, seed, dataset=dataset, final=0.8 + ours * (gain + 0.002 * (seed % 2)), **(AUTO if ours else {}))
        for dataset, gain in gains.items()
        for method, ours in (("recommended", True), ("keep", False))
        for seed in range(8)
    ]
    # 24 pairs of runs would give p = 2e-6.
    p = stats.ttest_1samp([2.1, 0.1, 1.1], 0).pvalue
    assert f"| +1.1 ± 2.5, median +1.1, p = {p:.2g} (3) |" in leads_table([group(rows)], "recommended")


def test_methods_are_compared_at_their_own_best_settings():
    # Over combinations M and N, at two learning rates: the best is 80 and 70 for keep, 90 and 60 for other peers.
    finals = {
        "keep": ((0.8, 0.5), (0.6, 0.7)),
        "MEI x10": ((0.9, 0.4), (0.5, 0.6)),
        "recommended": ((0.85, 0.3), (0.7, 0.75)),
    }
    found = [
        group(
            row(method, model=model, final=accuracies[place][index], **(AUTO if method == "recommended" else {}))
            for method, accuracies in finals.items()
            for index, model in enumerate("MN")
        )
        for place in range(2)
    ]
    table = entries(own_best_table(found, "recommended"))
    assert table["keep"] == ["75.0", "+5.0, median +5.0 (2)"]
    assert table["recommended"] == ["80.0", ""]
    assert table["best of the others"] == ["80.0", "+0.0, median +0.0 (2)"]


def test_picture_has_a_row_a_combination_and_a_panel_a_group(groups):
    figure = standings_figure([*groups, *groups], "recommended")
    first, second = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["M, D", "N, D"]
    for axes in (first, second):
        points = [(mark.get_xydata()[0].round(1).tolist(), to_hex(mark.get_color())) for mark in axes.get_lines()]
        assert ([91.7, 0.0], RECIPE.lower()) in points
        assert ([81.0, 0.0], KEEP) in points
        assert ([78.3, 1.0], RECIPE.lower()) in points
        # The first row at the top, and no marker on the edge.
        assert axes.get_ylim() == (1.5, -0.5)
    assert legend(figure) == ["recommended", "keep", "other methods"]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_picture_marks_keep_with_all_settings_of_the_recipe():
    fair = [row(FAIR, seed, final=accuracy, **AUTO) for seed, accuracy in enumerate([0.7, 0.72, 0.71])]
    figure = standings_figure([group(rows_of(("MEI x10", "recommended")) + fair)], "recommended")
    (axes,) = figure.axes
    points = {to_hex(mark.get_color()): mark.get_xydata()[0].round(1).tolist() for mark in axes.get_lines()}
    assert points[FAIR_COLOUR.lower()] == [71.0, 0.0]
    assert legend(figure) == ["recommended", FAIR_LABEL, "other methods"]


def test_report_of_recipes_leads_with_the_best(tmp_path):
    rows = [each for rate in (1e-3, 1e-4) for each in rows_of(FINALS)]
    for place, each in enumerate(rows):
        each["settings"] = {**each["settings"], "learning_rate": (1e-3, 1e-4)[place // 12]}
    page, *pictures = write_report([write(rows, tmp_path / "rows.parquet")], tmp_path / "out")
    assert [picture.name for picture in pictures] == ["overview.png"]
    text = page.read_text()
    assert text.count("| 1 of 1 | 1 of 1 | **2 of 2** |") == 2
    assert "Where other is behind" in text
    assert "| best of the others | 91.7 | +3.0, median +3.0 (1) |" in text
