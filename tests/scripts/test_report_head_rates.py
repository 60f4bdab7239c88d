"""The report's tables of the head learning rate, of rows with known numbers."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from reproduction.figures import head_rate_figure
from reproduction.groups import groups_of, varied_settings
from reproduction.head_rates import (
    CANDIDATES,
    delta_costs,
    delta_table,
    methods_table,
    one_rate_table,
    rule_table,
    split,
    sweeps,
)
from reproduction.report import write_report
from sample_rows import entries, row, runs, write

pytestmark = pytest.mark.reproduction


def rates(seeds=2):
    """Runs that are best at a head learning rate of 1e-3, and the rule's."""
    for base, (method, worse), rate, seed in product(
        [1e-5, 1e-4], [("entame", 0.0), ("keep", 0.1)], [None, 1e-4, 1e-3, 1e-2, "auto"], range(seeds)
    ):
        used = {None: base, "auto": 2e-3 * (1 + seed)}.get(rate, rate)
        measured = {"head_lr": used} if rate == "auto" else {}
        final = 0.9 - worse - 0.1 * abs(math.log10(used) + 3)
        yield row(method, seed, final=final, settings={"learning_rate": base, "head_lr": rate}, **measured)


def curves_of(rows):
    found = runs(rows)
    beside = {"head_lr", "logit_step", "learning_rate"}
    return groups_of(split(found)[1], varied_settings(found), beside=beside)


def test_one_model_is_drawn_with_a_line_a_method():
    assert split(runs(rates()))[0] == []
    (group,) = curves_of(rates())
    early, _, final, slow = head_rate_figure(group).axes
    assert [axes.get_title() for axes in (early, _)] == ["base learning rate 1e-5", "base learning rate 1e-4"]
    # At the base learning rate of 1e-4, a run without a head learning rate lies where 1e-4 was set.
    curves = {curve.get_label(): curve.get_xydata() for curve in slow.get_lines()}
    np.testing.assert_allclose(curves["ENTAME"], [[1e-4, 80], [1e-3, 90], [1e-2, 80]])
    curves = {curve.get_label(): curve.get_xydata() for curve in final.get_lines()}
    np.testing.assert_allclose(curves["keep"], [[1e-5, 60], [1e-4, 70], [1e-3, 80], [1e-2, 70]])
    stars = [curve.get_xydata()[0] for curve in final.get_lines() if curve.get_marker() == "*"]
    ruled = 90 - 10 * np.mean([math.log10(2), math.log10(4)])
    np.testing.assert_allclose(sorted(map(list, stars)), [[math.sqrt(8) * 1e-3, y] for y in (ruled - 10, ruled)])


def test_rule_is_compared_with_the_best_rate_that_was_set():
    rows = rule_table(sweeps(curves_of(rates()))).splitlines()[2:]
    assert rows[0] == "| M, D | 1e-5 | ENTAME | 90.0 (2) at 1e-3 | 85.5 (2) at 2.83e-3 | no |"
    assert len(rows) == 4


def rates_best_at(delta, methods=("mei", "keep"), datasets=("D", "E"), step=0.25, **settings):
    """Runs whose accuracy falls by 10 points for each factor of ten between their head learning rate and that of δ.

    The rule that measured rates had the δ of `step`.
    """
    for method, dataset, rate, seed in product(methods, datasets, [1e-4, 1e-3, 1e-2, "auto"], range(2)):
        rule = {"D": 1e-3, "E": 2e-3}[dataset] * step / 0.25
        # The rule measures half of its rate and twice of it.
        used = rule * (2 if seed else 0.5) if rate == "auto" else rate
        final = 0.9 - 0.1 * abs(math.log10(used / (rule * delta / step)))
        measured = {"head_lr": used} if rate == "auto" else {}
        given = {"head_lr": rate, "entame_method": method} | ({"logit_step": step} if measured else {}) | settings
        yield row(method, seed, "M", dataset, final, settings=given, **measured)


@pytest.mark.parametrize("step", [0.25, 0.5])
def test_cost_of_each_delta_is_read_off_the_rates_that_were_set(step):
    # In D, 1e-3 is the rate of 0.25, and the best of those set; in E its 2e-3 lies between 1e-3, the best, and 1e-2.
    header, _, *rows = delta_table(sweeps(curves_of(rates_best_at(0.25, step=step)))).splitlines()
    columns = [entry.strip() for entry in header.strip("|").split("|")]
    assert columns[3:] == [f"δ = {delta}" for delta in ("0.03", "0.06", "0.125", "0.25", "0.5", "1")]
    values = [[entry.strip() for entry in each.strip("|").split("|")] for each in rows]
    labels = [["default", "1e-4", "MEI"], ["default", "1e-4", "keep"], ["default", "all", "all"]]
    assert [each[:3] for each in values] == labels
    # E: means are 87.0 at 1e-3 and 83.0 at 1e-2, and so 85.8 at 2e-3: 1.2 below the best.
    assert values[0][columns.index("δ = 0.25")] == "0.6, at most 1.2 (2)"
    # D: half of the best rate costs 10 · log10(2). E: 1e-3 is δ = 0.125, and the best of those set.
    assert values[0][columns.index("δ = 0.125")] == "1.5, at most 3.0 (2)"
    assert values[2][columns.index("δ = 0.25")] == "0.6, at most 1.2 (4)"


@pytest.mark.parametrize("best", CANDIDATES)
def test_best_delta_costs_nothing(best):
    curve = {8e-3 * delta: {0: 90 - abs(math.log(delta / best))} for delta in CANDIDATES}
    assert delta_costs(curve, 8e-3) == pytest.approx({delta: abs(math.log(delta / best)) for delta in CANDIDATES})


def test_delta_beyond_the_rates_that_were_set_is_left_out():
    curve = {1e-3: {0: 90.0}, 4e-3: {0: 80.0, 1: 84.0}}
    assert delta_costs(curve, 4e-3) == pytest.approx({0.25: 0.0, 0.5: 4.0, 1.0: 8.0})
    assert delta_costs(curve, 4.0) == {}


def test_optimizers_have_rows_of_their_own():
    rows = [*rates_best_at(0.25), *rates_best_at(0.25, ["keep"], ["D"], optim="sgd")]
    found = [each.split(" | ")[:3] for each in delta_table(sweeps(curves_of(rows))).splitlines()[2:]]
    assert found[-2:] == [["| sgd", "1e-4", "keep"], ["| sgd", "all", "all"]]
    assert len(found) == 5
    assert delta_table(sweeps(curves_of([each for each in rows if each["settings"]["head_lr"] != "auto"]))) == ""


BEST = {"M": 1e-4, "N": 1e-3, "O": 1e-2}


def rates_best_by_model(chosen, models=("M", "N", "O")):
    """Runs whose accuracy falls by 10 points for each factor of ten from the model's best head learning rate."""
    for model, rate in product(models, [1e-4, 1e-3, 1e-2, "auto"]):
        used = chosen(model) if rate == "auto" else rate
        measured = {"head_lr": used} if rate == "auto" else {}
        final = 0.9 - 0.1 * abs(math.log10(used / BEST[model]))
        yield row("entame", 0, model, "D", final, settings={"head_lr": rate}, **measured)


def test_rule_is_compared_with_one_rate_for_all_models():
    # Of the rates for all, 1e-3 is best: 80, 90 and 80. The rule is off by a factor of ten for O alone.
    table = entries(one_rate_table(sweeps(curves_of(rates_best_by_model(lambda model: min(BEST[model], 1e-3))))))
    assert table["base"][:4] == ["method", "1e-4", "1e-3", "0.01"]
    assert table["1e-4"][:4] == ["ENTAME", "80.0", "83.3", "80.0"]
    # Differences of 10, 0 and 0 points: mean 10/3, and a standard error as large; t with two degrees of freedom.
    assert table["1e-4"][4:] == ["86.7, at 1.0e-4 to 1.0e-3", "+3.3 ± 14.3, p = 0.42 (3)", "90.0"]
    assert one_rate_table(sweeps(curves_of(rates_best_by_model(BEST.get, models=["M", "N"])))) == ""


def test_methods_are_compared_at_the_rules_rates():
    # ENTAME ends at 90 in all three, and MEI at 88, 87 and 86; one more combination is ENTAME's alone.
    rows = [
        row(method, 0, model, "D", final, settings={"head_lr": rate}, head_lr=1e-3)
        for method, finals in {"entame": [0.9] * 4, "mei": [0.88, 0.87, 0.86]}.items()
        for model, final in zip("MNOP", finals, strict=False)
        for rate in (1e-4, "auto")
    ]
    header, _, end, first = methods_table(curves_of(rows)).splitlines()
    assert header == "| base | accuracy | over MEI |"
    assert first == "| 1e-4 | first 10 steps | +0.0 ± 0.0, p = 1 (3) |"
    # A standard deviation of 1 over three combinations: an error of 1/√3, times t's 4.303.
    assert end == "| 1e-4 | at the end | +3.0 ± 2.5, p = 0.035 (3) |"
    assert methods_table(curves_of(rates_best_by_model(BEST.get))) == ""


def test_several_models_are_drawn_with_a_line_a_model(tmp_path):
    (group,) = curves_of(rates_best_by_model(BEST.get))
    _, final = head_rate_figure(group).axes
    stars = sorted(tuple(each.get_xydata()[0]) for each in final.get_lines() if each.get_marker() == "*")
    np.testing.assert_allclose(stars, [(rate, 90) for rate in sorted(BEST.values())])
    curves = [each.get_xydata() for each in final.get_lines() if each.get_marker() == "o"]
    np.testing.assert_allclose(curves[0], [[1e-4, 90], [1e-3, 80], [1e-2, 70]])
    assert final.get_xscale() == "log"
    page, picture = write_report([write(rates_best_by_model(BEST.get), tmp_path / "rows.parquet")], tmp_path / "out")
    assert picture.name == "overview.png"
    # One seed has no standard error.
    rule = [each for each in page.read_text().splitlines() if each.startswith(("| M, D", "| N, D", "| O, D"))]
    assert [each.split(" | ")[-1] for each in rule] == ["– |"] * 3
