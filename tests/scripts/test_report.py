"""What the report says of result lines: synthetic ones, whose numbers are known."""

from __future__ import annotations

import json
import math
from itertools import product

import numpy as np
import pytest
from reproduction import statistics
from reproduction.figures import overview, styles_of
from reproduction.findings import findings
from reproduction.report import write_report
from reproduction.runs import groups_of, read_runs, varied_settings
from reproduction.tables import (
    accuracy_table,
    early,
    final,
    gain_table,
    noise_table,
    step_ratios,
    steps_table,
    verdicts,
)
from scipy import stats

from entame_hf import InputError

STEPS = [*range(1, 11), 20, 40, 60]


def line(method="entame", seed=0, model="M", dataset="D", final=0.9, early=0.2, noise=0.5, **more):
    """A run whose accuracy stays at `early` for ten steps and then grows evenly to `final`."""
    evaluations = [[step, early + max(0, step - 10) / 50 * (final - early)] for step in STEPS]
    return {
        "suite": "synthetic",
        "model": model,
        "dataset": dataset,
        "method": method,
        "seed": seed,
        "settings": {"learning_rate": 1e-4, "entame_method": method} | more.pop("settings", {}),
        "classes": 10,
        "train_size": 400,
        "test_size": 100,
        "steps_per_epoch": 20,
        "evaluations": evaluations,
        "energies": {"step": [1, 2, 3], "noise_share": [noise, 0.3, None], "feature_var": [0.5, 0.4, 0.3 + seed / 10]},
        "seconds": 30.0,
        "device": "Synthetic 9000",
        "processes": 4,
        "commit": "0123abc",
        "versions": {"torch": "1.0"},
        "command": "python scripts/reproduce.py run --suite synthetic",
        **more,
    }


def cells(table):
    """A Markdown table as a dict of its rows' cells, by the first cell."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return {row[0]: row[1:] for row in rows}


DIFFERENCES = [0.5, 1.5, 1.0, 3.0]


def test_a_paired_comparison_is_scipys():
    first = {seed: 10 + value for seed, value in enumerate(DIFFERENCES)} | {9: 100.0}
    second = dict.fromkeys(range(4), 10.0) | {7: -100.0}
    comparison = statistics.paired(first, second)
    expected = stats.ttest_rel([10 + value for value in DIFFERENCES], [10.0] * 4)
    low, high = expected.confidence_interval(0.95)
    assert comparison.n == 4  # seeds 7 and 9 have no partner
    assert comparison.difference == 1.5
    assert comparison.p == pytest.approx(expected.pvalue)
    assert (comparison.difference - comparison.margin, comparison.difference + comparison.margin) == pytest.approx(
        (low, high)
    )


@pytest.mark.parametrize(("shift", "p"), [(0.0, 1.0), (0.3, 0.0)])
def test_the_same_difference_in_every_seed_leaves_no_doubt(shift, p):
    values = {0: 0.1, 1: 0.7, 2: 0.4}
    comparison = statistics.paired({seed: value + shift for seed, value in values.items()}, values)
    assert (comparison.margin, comparison.p) == (0, p)


@pytest.mark.parametrize("seeds", [1, 2])
def test_two_seeds_have_a_difference_and_no_test(seeds):
    comparison = statistics.paired(dict.fromkeys(range(seeds), 3.0) | {9: 2.0}, dict.fromkeys(range(seeds), 1.0))
    assert (comparison.difference, comparison.n) == (2.0, seeds)
    assert math.isnan(comparison.p)
    assert math.isnan(comparison.margin)
    assert statistics.paired({0: 1.0}, {1: 1.0}) is None


def test_holms_correction_by_hand():
    # 4 · 0.01; 3 · 0.02; 2 · 0.025, which may not be smaller than the one before; 1 · 0.5.
    assert statistics.holm([0.5, 0.01, 0.025, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert statistics.holm([0.6, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []


def test_one_standard_error_is_that_of_the_difference():
    best = {0: 10.0, 1: 20.0, 2: 30.0}
    # Differences −1, 0, −2: their mean is −1 and its standard error 0.577. Between seeds it would be 5.8.
    assert not statistics.within_one_error(best, {0: 9.0, 1: 20.0, 2: 28.0})
    # −1, 1, −1: mean −0.33, standard error 0.67.
    assert statistics.within_one_error(best, {0: 9.0, 1: 21.0, 2: 29.0})
    assert statistics.within_one_error({0: 1.0}, {0: 1.0})
    assert not statistics.within_one_error({0: 1.0}, {0: 0.9})


def test_steps_to_an_accuracy_are_the_first_evaluated_ones_that_reach_it():
    accuracies = {1: 0.1, 10: 0.5, 20: 0.4, 30: 0.9}
    assert statistics.steps_to_reach(accuracies, 0.5) == 10
    assert statistics.steps_to_reach(accuracies, 0.51) == 30
    assert statistics.steps_to_reach(accuracies, 0.91) == math.inf


def test_quartiles_hold_what_was_never_reached():
    assert statistics.quartiles([0.2, 0.4, math.inf]) == (0.4, 0.4, math.inf)
    assert statistics.quartiles([0.5]) == (0.5, 0.5, 0.5)


def test_the_noise_share_is_that_before_the_first_update(group):
    lines = [
        line("base", 0, noise=0.4),
        line("base", 1, noise=0.6),
        line("base", 0, model="ResNet50", dataset="MNIST"),
    ]
    table = cells(noise_table(group(lines)))
    assert table[""] == ["MNIST", "D"]
    assert table["M"] == ["–", "50.0 (2)"]
    assert table["ResNet50"] == ["50.0 (1)<br><sub>paper 34.60 ± 0.75</sub>", "–"]


def test_a_noise_share_that_overflowed_is_missing(group):
    assert "–" in noise_table(group([line("base", noise=None)]))


def test_the_gain_is_that_of_the_first_ten_steps(group):
    bases, entames = [0.10, 0.12, 0.11], [0.20, 0.23, 0.24]
    lines = [line("base", seed, early=early) for seed, early in enumerate(bases)]
    lines += [line("entame", seed, early=early) for seed, early in enumerate(entames)]
    expected = stats.ttest_rel(entames, bases)
    margin = 100 * (expected.confidence_interval(0.95).high - (np.mean(entames) - np.mean(bases)))
    assert cells(gain_table(group(lines)))["M"] == [f"+11.3 ± {margin:.1f}, p = {expected.pvalue:.2g} (3)"]


def test_the_first_ten_steps_are_ten_and_only_those(read):
    (run,) = read([line(evaluations=[[step, step / 100] for step in range(1, 21)])])
    assert run.early == pytest.approx(0.055)
    assert run.final == 0.2


def test_cells_that_miss_one_method_are_shown_as_missing(group):
    lines = [line("base", 0), line("entame", 0), line("base", 0, model="N"), line("keep", 1, dataset="E")]
    found = group(lines)
    assert cells(gain_table(found)) == {"": ["D", "E"], "---": ["---"] * 2, "M": ["+0.0 (1)", "–"], "N": ["–", "–"]}
    assert cells(accuracy_table(found, "D", final))["N"] == ["90.0 (1)", "–", "–"]
    assert cells(accuracy_table(found, "E", final))["N"] == ["–", "–", "–"]


def test_the_best_and_what_is_as_good_are_bold(group):
    accuracies = {"base": [0.7, 0.8], "mei": [0.91, 0.93], "entame": [0.92, 0.9], "LP-FT": [0.5, 0.6]}
    lines = [line(method, seed, final=final) for method in accuracies for seed, final in enumerate(accuracies[method])]
    table = cells(accuracy_table(group(lines), "D", final))
    assert table["D"] == ["Base", "MEI", "ENTAME", "LP-FT"]
    # ENTAME − MEI is +1 and −3 points: −1 on average, with a standard error of 2.
    assert table["M"] == ["75.0 (2)", "**92.0** (2)", "**91.0** (2)", "55.0 (2)"]


def test_ties_are_all_bold(group):
    lines = [line(method, seed, final=0.9) for method in ("mei", "entame") for seed in range(3)]
    assert cells(accuracy_table(group(lines), "D", final))["M"] == ["**90.0 ± 0.0** (3)"] * 2
    assert verdicts(group(lines), "D", final) == [
        "Above ENTAME: none.",
        "Below ENTAME: none.",
        "Not told apart from ENTAME: **MEI** (M +0.0 ± 0.0).",
    ]


def test_the_papers_figures_stand_beside_ours(group):
    lines = [line(method, model="VGG16", dataset="CIFAR10") for method in ("base", "entame", "keep")]
    row = cells(accuracy_table(group(lines), "CIFAR10", final))["VGG16"]
    assert ["paper 87.50 ± 0.37" in row[0], "paper 89.19 ± 0.25" in row[1], "paper" in row[2]] == [True, True, False]


def test_means_have_the_confidence_intervals_that_the_papers_have(group):
    finals = [0.7, 0.8, 0.75, 0.77]
    lines = [line("base", seed, "VGG16", "CIFAR10", final=final, noise=final) for seed, final in enumerate(finals)]
    low, high = stats.ttest_1samp([100 * final for final in finals], 0).confidence_interval(0.95)
    ours = f"75.5 ± {(high - low) / 2:.1f} (4)<br><sub>paper "
    assert cells(accuracy_table(group(lines), "CIFAR10", final))["VGG16"][0].startswith(ours)
    assert cells(noise_table(group(lines)))["VGG16"][0].startswith(ours)


def test_the_first_picture_names_the_strongest_peers(group):
    found = group([line(method, seed) for method in ("base", "mei", "entame", "LP-FT", "fastai") for seed in (0, 1)])
    styles = styles_of([found])
    figure = overview(found, styles)
    names = {text.get_text(): handle for text, handle in zip(*_legend(figure), strict=True)}
    assert [*names] == ["Base", "MEI", "LP-FT", "ENTAME", "other methods"]
    assert all(names[name].get_color() == styles[name]["color"] for name in ("MEI", "LP-FT"))
    colours = [curve.get_color() for curve in figure.axes[0].get_lines()]
    assert colours.count(names["other methods"].get_color()) == 1


def _legend(figure):
    (legend,) = figure.legends
    return legend.get_texts(), legend.legend_handles


def test_a_peer_that_beats_entame_is_named(group):
    noise = [0.0, 0.002, 0.004, 0.001]
    means = {"entame": 0.9, "keep": 0.95, "base": 0.6, "zero head": 0.902}
    lines = [
        line(method, seed, final=mean + noise[(seed + i) % 4])
        for i, (method, mean) in enumerate(means.items())
        for seed in range(4)
    ]
    above, below, equal = verdicts(group(lines), "D", final)
    assert above.startswith("Above ENTAME: **keep** (M −5.0 ± ")
    assert below.startswith("Below ENTAME: **Base** (M +30.0 ± ")
    assert equal.startswith("Not told apart from ENTAME: **zero head** (M −0.2 ± ")


def test_the_first_ten_steps_are_compared_as_the_end_is(group):
    early_means, noise = {"base": 0.1, "entame": 0.3, "LP-FT": 0.4}, [0.0, 0.02, 0.04, 0.01]
    lines = [
        line(method, seed, "VGG16", "CIFAR10", final=0.9, early=mean + noise[(seed + i) % 4])
        for i, (method, mean) in enumerate(early_means.items())
        for seed in range(4)
    ]
    table = accuracy_table(group(lines), "CIFAR10", early)
    assert cells(table)["VGG16"][2].startswith("**41.8 ±")
    # The paper has no such table.
    assert "paper" not in table
    above, below, equal = verdicts(group(lines), "CIFAR10", early)
    assert above.startswith("Above ENTAME: **LP-FT** (VGG16 −10.0 ± ")
    assert below.startswith("Below ENTAME: **Base** (VGG16 +20.0 ± ")
    assert equal == "Not told apart from ENTAME: none."


def test_the_more_methods_are_compared_the_more_it_takes_to_tell_them_apart(group):
    # p = 0.039 by itself, and 0.078 as one of two.
    finals = {"entame": [0.8] * 4, "base": [0.785, 0.785, 0.795, 0.795], "keep": [0.785, 0.785, 0.795, 0.795]}
    lines = [line(method, seed, final=final) for method in finals for seed, final in enumerate(finals[method])]
    assert verdicts(group(lines[:8]), "D", final)[1] == "Below ENTAME: **Base** (M +1.0 ± 0.9)."
    assert verdicts(group(lines), "D", final)[1] == "Below ENTAME: none."


def test_steps_to_where_others_end(group):
    # ENTAME is at 0.55 after 20 of 60 steps, at 0.725 after 40 and at 0.9 at the end.
    lines = [line("entame", seed, early=0.4) for seed in range(3)]
    lines += [line("keep", seed, final=final) for seed, final in enumerate([0.48, 0.7, 0.95])]
    found = group(lines)
    assert step_ratios(found, "M", "D", "keep") == {0: 20 / 60, 1: 40 / 60, 2: math.inf}
    assert cells(steps_table(found))["M"] == ["D", "0.67 (0.67–∞; 3, never in 1)"]


def test_what_a_method_has_several_values_of_is_a_grid(read):
    grid = product([1e-4, 1e-3], [("big", 64), ("small", 256)], [("entame", 1), ("keep, head x10", 10)])
    lines = [
        line(method, model=model, settings={"learning_rate": rate, "batch": batch, "head_lr_multiplier": factor})
        for rate, (model, batch), (method, factor) in grid
    ]
    # A rate of its own stands in every group, and one of the grid's in that group.
    lines += [line("fastai", model="big", settings={"learning_rate": 2e-3})]
    lines += [line("LP-FT", model="big", settings={"learning_rate": 1e-3})]
    runs = read(lines)
    varied = varied_settings(runs)
    assert varied == {(model, "D"): {"learning_rate": {"1e-3", "1e-4"}} for model in ("big", "small")}
    groups = {group.title: group.methods for group in groups_of(runs, varied)}
    assert groups == {
        "`learning_rate` 1e-3": ["entame", "fastai", "keep, head x10", "LP-FT"],
        "`learning_rate` 1e-4": ["entame", "fastai", "keep, head x10"],
    }


def test_a_setting_that_some_lines_lack_tells_them_apart(read):
    runs = read([line(), line(settings={"weight_decay": 0.1})])
    assert [group.title for group in groups_of(runs, varied_settings(runs))] == [
        "`weight_decay` 0.1",
        "`weight_decay` null",
    ]


def test_cells_where_nothing_varies_count_once(tmp_path, read):
    lines = suite(["M", "N"], ["D", "E"], ("base", "entame", "keep"))
    lines += [each | {"settings": each["settings"] | {"batch": 64}} for each in lines if each["dataset"] == "D"]
    # A rate of its own is in both groups of its cell, and in the one of the others.
    lines += [line("fastai", dataset=dataset, settings={"learning_rate": 2e-3, "batch": 32}) for dataset in "DE"]
    runs = read(lines)
    groups = {group.title: group for group in groups_of(runs, varied_settings(runs))}
    assert {title: group.datasets for title, group in groups.items()} == {
        "": ["E"],
        "`batch` 64": ["D"],
        "`batch` null": ["D"],
    }
    assert all(group.methods[-1] == "fastai" for group in groups.values())
    text = write_report([tmp_path / "lines.jsonl"], tmp_path / "out")[0].read_text()
    assert "of 6** cells" in text
    assert text.count("### Accuracy at the end, E") == 1


def suite(models, datasets, methods=("base", "entame", "keep", "LP-FT"), seeds=3):
    generator = np.random.default_rng(0)
    return [
        line(method, seed, model, dataset, final=0.8 + generator.normal(0, 0.01), early=early + 0.01 * seed)
        for model, dataset in product(models, datasets)
        for method, early in zip(methods, (0.1, 0.3, 0.15, 0.2), strict=False)
        for seed in range(seeds)
    ]


def write(lines, file):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_report_of_other_methods_says_nothing_of_entame(tmp_path):
    lines = suite(["Net"], ["D"], methods=["stays", "falls"])
    page, *pictures = write_report([write(lines, tmp_path / "lines")], tmp_path / "out")
    introduction, _, rest = page.read_text().partition("\n## ")
    assert "ENTAME" in introduction
    assert "ENTAME" not in rest
    assert "### Methods beside each other" in rest
    assert [picture.name for picture in pictures] == ["peers_net.png"]


def test_the_same_lines_in_any_order_give_the_same_bytes(tmp_path):
    lines = suite(["Net 2", "Net 10"], ["D"])
    np.random.default_rng(1).shuffle(shuffled := list(lines))
    files = [write(lines, tmp_path / "a"), write(shuffled[:15], tmp_path / "b"), write(shuffled[10:], tmp_path / "c")]
    first = write_report(files[:1], tmp_path / "out" / "first")
    second = write_report(files[1:], tmp_path / "out" / "second")
    assert [path.name for path in first] == [path.name for path in second]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert {path.name for path in first} == {
        "report.md",
        "overview.png",
        *(f"{kind}_net-{n}.png" for kind in ("accuracy", "peers", "feature-variance") for n in (2, 10)),
    }


def test_the_page_shows_every_picture_and_counts_what_the_lines_show(tmp_path):
    lines = suite(["Net 2"], ["D", "E"])
    # On one data set ENTAME gains nothing and ends below both.
    for each in lines:
        if (each["dataset"], each["method"]) == ("E", "entame"):
            each["evaluations"] = line(early=0.1, final=0.3 + 0.01 * each["seed"])["evaluations"]
    page, *pictures = write_report([write(lines, tmp_path / "lines")], tmp_path / "out")
    text = page.read_text()
    assert all(f"]({picture.name})" in text for picture in pictures)
    assert "first 10 steps is above Base's with p < 0.01, in **1 of 2** cells. Not with Net 2 E −1.0 ± 2.5" in text
    assert "Against *keep* at the end: ahead in **0 of 2** cells, behind in 1 (Net 2 E −4" in text
    assert "bands and error bars are one standard\ndeviation over seeds" in text
    assert text.index("### Accuracy over the first 10 steps, D") < text.index("### Accuracy at the end, D")
    assert "24 runs, by suite: synthetic; seeds in a cell: 3." in text
    # Four runs of 30 seconds at a time: 480 an hour.
    assert "24 runs, 720 s of them all together; with 4 at a time" in text
    assert "480 runs an hour" in text


def test_findings_name_the_cells_where_entame_is_not_ahead(read):
    noise = [0.0, 0.002, 0.004, 0.001]
    # By data set: the mean accuracy at the end of each method.
    means = {"A": (0.9, 0.8, 0.7), "B": (0.9, 0.92, 0.85), "C": (0.9, 0.9, 0.95)}
    lines = [
        line(method, seed, dataset=dataset, final=mean + noise[(seed + i) % 4], early=0.2 + 0.1 * i + noise[seed])
        for dataset, finals in means.items()
        for i, (method, mean) in enumerate(zip(("entame", "keep", "LP-FT"), finals, strict=True))
        for seed in range(4)
    ]
    lines += [line("MEI", 0, dataset="B", final=0.1)]
    _, base, keep, best, peer, slow = findings(groups_of(read(lines), {}))
    assert base == "Against Base at the end: no cell has three seeds of both."
    assert keep.startswith("Against *keep* at the end: ahead in **1 of 3** cells, behind in 1 (M B −2.0 ± ")
    assert "not told apart in 1 (M C +0.0 ± 0.4)." in keep
    assert best.endswith(", of 3 cells: **ENTAME** (1), **keep** (1: M B), **LP-FT** (1: M C).")
    assert peer == (
        "Against LP-FT: over the first 10 steps, ahead in **0 of 3** cells, behind in 3, not told apart in 0; "
        "at the end, ahead in **2 of 3** cells, behind in 1, not told apart in 0."
    )
    assert "no cell has three seeds" in slow


def test_the_more_cells_are_counted_the_more_it_takes_to_be_ahead(read):
    # p = 0.039 in each cell, and 0.078 as one of two.
    finals = {"entame": [0.8] * 4, "keep": [0.785, 0.785, 0.795, 0.795]}
    lines = [
        line(method, seed, dataset=dataset, final=final)
        for dataset, (method, values) in product("DE", finals.items())
        for seed, final in enumerate(values)
    ]
    assert "ahead in **1 of 1** cells" in findings(groups_of(read(lines[:8]), {}))[2]
    assert "ahead in **0 of 2** cells" in findings(groups_of(read(lines), {}))[2]


def test_a_report_of_one_seed_says_what_it_can(tmp_path):
    page, *_ = write_report([write([line()], tmp_path / "lines")], tmp_path / "one")
    assert "90.0 (1)" in page.read_text()
    assert "no cell has three seeds of both" in page.read_text()


OLD = {"method": "base", "seed": 0, "accuracy_by_step": [0.1], "learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(line())[:80], "line 2: this is no JSON.*half a line.*delete"),
        (json.dumps(OLD), "no line that `python scripts/reproduce.py run` wrote: it has no 'evaluations'"),
        (json.dumps(line(evaluations=[[1, 96.5]])), r"an accuracy in \[0, 1\]"),
        (json.dumps(line(settings={"head_lr": "auto"})), "it has no 'head_lr'"),
        ("[1, 2]", "wrong kind"),
    ],
    ids=["torn", "foreign", "percent", "unmeasured", "list"],
)
def test_what_is_no_result_line_is_refused_before_anything_is_written(tmp_path, text, message):
    file = tmp_path / "lines"
    file.write_text(f"{json.dumps(line())}\n{text}\n")
    with pytest.raises(InputError, match=message):
        write_report([file], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_to_report_on_is_refused(tmp_path):
    with pytest.raises(InputError, match="is no file"):
        write_report([tmp_path / "missing"], tmp_path / "out")
    (tmp_path / "empty").touch()
    with pytest.raises(InputError, match="no result line"):
        write_report([tmp_path / "empty"], tmp_path / "out")


def test_a_file_in_the_place_of_the_folder_is_left_alone(tmp_path):
    file = write([line()], tmp_path / "lines")
    with pytest.raises(InputError, match="Name a folder"):
        write_report([file], file)
    assert read_runs([file])
