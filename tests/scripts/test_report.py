"""The report of rows with known numbers."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from reproduction import significance
from reproduction.figures import overview, styles_of
from reproduction.groups import early, final, groups_of, varied_settings
from reproduction.report import write_report
from reproduction.tables import accuracy_table, entame_table, gain_table, noise_table
from sample_rows import entries, group, row, runs, write
from scipy import stats

from entame_hf import InputError

pytestmark = pytest.mark.reproduction
DIFFERENCES = [0.5, 1.5, 1.0, 3.0]
RESULTS = Path(__file__).parents[2] / "scripts" / "results"


def test_paired_comparison_equals_scipys():
    first = {seed: 10 + value for seed, value in enumerate(DIFFERENCES)} | {9: 100.0}
    # Seeds 7 and 9 have no partner.
    comparison = significance.paired(first, dict.fromkeys(range(4), 10.0) | {7: -100.0})
    expected = stats.ttest_rel([10 + value for value in DIFFERENCES], [10.0] * 4)
    interval = (comparison.difference - comparison.margin, comparison.difference + comparison.margin)
    assert (comparison.n, comparison.difference, comparison.median) == (4, 1.5, 1.25)
    assert comparison.p == pytest.approx(expected.pvalue)
    assert interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert significance.paired({0: 1.0, 1: 3.0}).difference == 2


@pytest.mark.parametrize(("shift", "p"), [(0.0, 1.0), (0.3, 0.0)])
def test_equal_differences_leave_no_doubt(shift, p):
    values = {0: 0.1, 1: 0.7, 2: 0.4}
    comparison = significance.paired({seed: value + shift for seed, value in values.items()}, values)
    assert (comparison.margin, comparison.p) == (0, p)


@pytest.mark.parametrize("seeds", [1, 2])
def test_two_seeds_are_not_tested(seeds):
    comparison = significance.paired(dict.fromkeys(range(seeds), 3.0) | {9: 2.0}, dict.fromkeys(range(seeds), 1.0))
    assert (comparison.difference, comparison.n) == (2.0, seeds)
    assert math.isnan(comparison.p)
    assert math.isnan(comparison.margin)
    assert significance.paired({0: 1.0}, {1: 1.0}) is None


def test_holms_correction():
    # 4 · 0.01; 3 · 0.02; 2 · 0.025, which must not be smaller than the one before; 1 · 0.5.
    assert significance.holm([0.5, 0.01, 0.025, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert significance.holm([0.6, 0.9]) == [1.0, 1.0]
    assert significance.holm([]) == []


def test_standard_error_is_that_of_the_paired_difference():
    best = {0: 10.0, 1: 20.0, 2: 30.0}
    # Differences −1, 0, −2: mean −1, standard error 0.577. Between seeds it would be 5.8.
    assert not significance.within_one_error(best, {0: 9.0, 1: 20.0, 2: 28.0})
    # −1, 1, −1: mean −0.33, standard error 0.67.
    assert significance.within_one_error(best, {0: 9.0, 1: 21.0, 2: 29.0})
    assert significance.within_one_error({0: 1.0}, {0: 1.0})
    assert not significance.within_one_error({0: 1.0}, {0: 0.9})


def test_noise_share_is_that_of_the_first_batch():
    rows = [row("base", 0, noise=0.4), row("base", 1, noise=0.6), row("base", 0, model="ResNet50", dataset="MNIST")]
    table = entries(noise_table(group(rows)))
    assert table[""] == ["MNIST", "D"]
    assert table["M"] == ["–", "50.0 (2)"]
    assert table["ResNet50"] == ["50.0 (1)<br><sub>paper 34.60 ± 0.75</sub>", "–"]
    assert "–" in noise_table(group([row("base", noise=None)]))


def test_gain_is_that_of_the_first_ten_steps():
    bases, entames = [0.10, 0.12, 0.11], [0.20, 0.23, 0.24]
    rows = [row(m, s, early=e) for m, all_ in (("base", bases), ("entame", entames)) for s, e in enumerate(all_)]
    expected = stats.ttest_rel(entames, bases)
    margin = 100 * (expected.confidence_interval(0.95).high - (np.mean(entames) - np.mean(bases)))
    assert entries(gain_table(group(rows)))["M"] == [f"+11.3 ± {margin:.1f}, p = {expected.pvalue:.2g} (3)"]
    steps = [*range(1, 21)]
    (run,) = runs([row(eval_step=steps, eval_accuracy=[step / 100 for step in steps])])
    assert early(run) == pytest.approx(5.5)
    assert final(run) == 20


def test_missing_combinations_are_shown():
    rows = [row("base", 0), row("entame", 0), row("base", 0, model="N"), row("keep", 1, dataset="E")]
    found = group(rows)
    assert entries(gain_table(found)) == {"": ["D", "E"], "---": ["---"] * 2, "M": ["+0.0 (1)", "–"], "N": ["–", "–"]}
    assert entries(accuracy_table(found, "D", final))["N"] == ["90.0 (1)", "–", "–"]
    assert entries(accuracy_table(found, "E", final))["N"] == ["–", "–", "–"]


def test_best_and_equally_good_methods_are_bold():
    accuracies = {"base": [0.7, 0.8], "mei": [0.91, 0.93], "entame": [0.92, 0.9], "LP-FT": [0.5, 0.6]}
    rows = [row(method, seed, final=value) for method in accuracies for seed, value in enumerate(accuracies[method])]
    table = entries(accuracy_table(group(rows), "D", final))
    assert table["D"] == ["Base", "MEI", "ENTAME", "LP-FT"]
    # ENTAME − MEI is +1 and −3 points: −1 on average, with a standard error of 2.
    assert table["M"] == ["75.0 (2)", "**92.0** (2)", "**91.0** (2)", "55.0 (2)"]


def test_paper_stands_beside_our_means():
    finals = [0.7, 0.8, 0.75, 0.77]
    rows = [row("base", seed, "VGG16", "CIFAR10", final=value, noise=value) for seed, value in enumerate(finals)]
    rows += [row(method, model="VGG16", dataset="CIFAR10") for method in ("entame", "keep")]
    low, high = stats.ttest_1samp([100 * value for value in finals], 0).confidence_interval(0.95)
    ours = f"75.5 ± {(high - low) / 2:.1f} (4)<br><sub>paper "
    base, entame, keep = entries(accuracy_table(group(rows), "CIFAR10", final))["VGG16"]
    assert base == f"{ours}87.50 ± 0.37</sub>"
    assert "paper 89.19 ± 0.25" in entame
    assert "paper" not in keep
    assert entries(noise_table(group(rows)))["VGG16"][0].startswith(ours)
    assert "paper" not in accuracy_table(group(rows), "CIFAR10", early)


NOISE = [0.0, 0.002, 0.004, 0.001]


def test_entame_table_counts_where_it_is_ahead():
    # By dataset: the mean accuracy of each method at the end.
    means = {"A": (0.9, 0.8, 0.7), "B": (0.9, 0.92, 0.85), "C": (0.9, 0.9, 0.95)}
    rows = [
        row(method, seed, dataset=dataset, final=mean + NOISE[(seed + i) % 4], early=0.2 + 0.1 * i + NOISE[seed])
        for dataset, finals in means.items()
        for i, (method, mean) in enumerate(zip(("entame", "keep", "LP-FT"), finals, strict=True))
        for seed in range(4)
    ]
    rows += [row("slow", 0, dataset="B", final=0.1)]
    table = entries(entame_table(group(rows)))
    assert list(table) == ["", "---", "slow", "LP-FT", "keep", "ENTAME"]
    assert table["keep"] == ["30.2", "−10.0 to −10.0", "0, 3, 0", "87.5", "−2.0 to +10.0", "1, 1, 1"]
    assert table["LP-FT"][3:] == ["83.5", "−5.0 to +20.0", "2, 1, 0"]
    assert table["slow"][-1] == "–"
    assert table["ENTAME"] == ["20.2", "", "", "90.2", "", ""]


def test_more_combinations_need_more_evidence():
    # p = 0.039 in each combination, and 0.078 as one of two.
    finals = {"entame": [0.8] * 4, "keep": [0.785, 0.785, 0.795, 0.795]}
    rows = [row(m, s, dataset=d, final=a) for d in "DE" for m, all_ in finals.items() for s, a in enumerate(all_)]
    assert entries(entame_table(group(rows[:8])))["keep"][-1] == "1, 0, 0"
    assert entries(entame_table(group(rows)))["keep"][-1] == "0, 0, 2"


def test_overview_names_the_strongest_peers():
    found = group([row(method, seed) for method in ("base", "mei", "entame", "LP-FT", "fastai") for seed in (0, 1)])
    styles = styles_of([found])
    figure = overview(found, styles)
    (legend,) = figure.legends
    names = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    assert [*names] == ["Base", "MEI", "LP-FT", "ENTAME", "other methods"]
    assert all(names[name].get_color() == styles[name]["color"] for name in ("MEI", "LP-FT"))
    colours = [curve.get_color() for curve in figure.axes[0].get_lines()]
    assert colours.count(names["other methods"].get_color()) == 1


def test_settings_with_several_values_are_a_grid():
    grid = product([1e-4, 1e-3], [("big", 64), ("small", 256)], [("entame", 1), ("keep, head x10", 10)])
    rows = [
        row(method, model=model, settings={"learning_rate": rate, "batch": batch, "head_lr_multiplier": factor})
        for rate, (model, batch), (method, factor) in grid
    ]
    # A value of its own joins every group, a value of the grid joins its group.
    rows += [row("fastai", model="big", settings={"learning_rate": 2e-3})]
    rows += [row("LP-FT", model="big", settings={"learning_rate": 1e-3})]
    varied = varied_settings(runs(rows))
    assert varied == {(model, "D"): {"learning_rate": {"1e-3", "1e-4"}} for model in ("big", "small")}
    assert {each.title: each.methods for each in groups_of(runs(rows), varied)} == {
        "`learning_rate` 1e-3": ["entame", "fastai", "keep, head x10", "LP-FT"],
        "`learning_rate` 1e-4": ["entame", "fastai", "keep, head x10"],
    }


def test_missing_setting_is_a_value():
    found = runs([row(), row(settings={"weight_decay": 0.1})])
    titles = [each.title for each in groups_of(found, varied_settings(found))]
    assert titles == ["`weight_decay` 0.1", "`weight_decay` null"]


def suite(models, datasets, methods=("base", "entame", "keep", "LP-FT"), seeds=3):
    generator = np.random.default_rng(0)
    return [
        row(method, seed, model, dataset, final=0.8 + generator.normal(0, 0.01), early=early + 0.01 * seed)
        for model, dataset in product(models, datasets)
        for method, early in zip(methods, (0.1, 0.3, 0.15, 0.2), strict=False)
        for seed in range(seeds)
    ]


def test_report_is_the_same_in_any_order(tmp_path):
    rows = suite(["Net"], ["D", "E"])
    pages = []
    for name, ordered in (("a", rows), ("b", rows[::-1] + rows[:3])):
        page, *pictures = write_report([write(ordered, tmp_path / f"{name}.parquet")], tmp_path / name / "out")
        assert [picture.name for picture in pictures] == ["overview.png"]
        pages.append(page.read_text().replace(f"{name}.parquet", ""))
    assert pages[0] == pages[1]
    assert "24 runs" in pages[0]
    assert "24 runs in 3.0 minutes of the device, 4 at a time" in pages[0]


def test_report_of_other_methods_says_nothing_of_entame(tmp_path):
    page, *pictures = write_report(
        [write(suite(["Net"], ["D"], ["stays", "falls"]), tmp_path / "rows.parquet")], tmp_path / "out"
    )
    assert "ENTAME" not in page.read_text().partition("\n## ")[2]
    assert pictures == []


@pytest.mark.parametrize("content", [b"no Parquet", b""])
def test_report_refuses_other_files(tmp_path, content):
    file = tmp_path / "rows.parquet"
    file.write_bytes(content)
    with pytest.raises(InputError, match="holds other rows"):
        write_report([file], tmp_path / "out")
    with pytest.raises(InputError, match="has no result rows"):
        write_report([tmp_path / "missing.parquet"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_report_refuses_a_file_as_its_folder(tmp_path):
    file = write([row()], tmp_path / "rows.parquet")
    with pytest.raises(InputError, match="Name a folder"):
        write_report([file], file)


PUBLISHED = [file.parent.name for file in RESULTS.glob("*/report.md")]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_reports_are_drawn_from_the_published_rows(name, tmp_path):
    page = (RESULTS / name / "report.md").read_text()
    files = page.partition("--results ")[2].partition("`")[0].split()
    assert write_report([RESULTS / file for file in files], tmp_path / name)[0].read_text() == page


def test_every_published_suite_has_a_report():
    assert PUBLISHED
    assert {file.stem for file in RESULTS.glob("*.parquet")} == {*PUBLISHED}
