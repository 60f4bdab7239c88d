"""What counts as success in the contest, on result rows with known numbers."""

from __future__ import annotations

import pytest
from reproduction.contest import CANDIDATE, corruption_table, duel_table, duels, is_contest, ranking_table, verdict
from reproduction.groups import final, groups_of, varied_settings
from reproduction.report import write_report
from sample_rows import entries, group, row, runs, write

pytestmark = pytest.mark.reproduction
MODELS, DATASETS = "ABCDEFG", "XYZ"
NOISE = (-0.001, 0.0, 0.002)


def rows_of(lead, seeds=3, suite="contest", **more):
    """The candidate and one peer on 21 combinations; `lead` is a number or maps a combination to one."""
    found = []
    for place, (model, dataset) in enumerate((m, d) for m in MODELS for d in DATASETS):
        ahead = lead(model, dataset) if callable(lead) else lead
        for seed in range(seeds):
            settings = {"settings": {"head_lr": "auto"}, "head_lr": 1e-3}
            base = 0.7 + place / 200 + NOISE[seed]
            common = {"model": model, "dataset": dataset, "suite": suite, **more}
            found.append(row("peer", seed, final=base, **common))
            # The lead has some noise over seeds, so that it can be tested.
            found.append(row(CANDIDATE, seed, final=base + ahead + NOISE[-1 - seed] / 4, **settings, **common))
    return found


def test_lead_on_every_combination_wins():
    (duel,) = duels([group(rows_of(0.02))])
    assert duel.won
    assert duel.lead.n == 21
    assert duel.lead.difference == pytest.approx(2, abs=0.1)
    assert verdict([group(rows_of(0.02))], (1, 21)) == f"**{CANDIDATE} succeeds: it wins all 1 duels.**"
    # Part of the test proves nothing.
    for wanted in ((1, 22), (2, 21)):
        assert "No verdict yet" in verdict([group(rows_of(0.02))], wanted)


def test_mean_lead_that_may_be_chance_does_not_win():
    # Half of the combinations ahead by two points, half behind by slightly less, none of them far beyond its noise.
    (duel,) = duels([group(rows_of(lambda model, dataset: 0.0012 if model in "ACEG" else -0.001))])
    assert duel.lead.difference > 0
    assert duel.lead.p > 0.05
    assert not duel.won


def test_one_combination_that_is_significantly_behind_loses_the_duel():
    (duel,) = duels([group(rows_of(lambda model, dataset: -0.1 if (model, dataset) == ("C", "Y") else 0.05))])
    assert duel.lead.p < 0.05
    assert duel.behind == [("C", "Y")]
    assert not duel.won
    assert "does not succeed" in verdict(
        [group(rows_of(lambda m, d: -0.1 if (m, d) == ("C", "Y") else 0.05))], (1, 21)
    )
    # Whatever runs that are missing bring, a duel is lost.
    lost = [group(rows_of(lambda m, d: -0.1 if (m, d) == ("C", "Y") else 0.05)), group(rows_of(0.02, seeds=2))]
    assert "does not succeed: it wins 0 of 1 duels, and misses runs for 1 others." in verdict(lost, (2, 21))
    assert "C, Y" in duel_table([group(rows_of(lambda m, d: -0.1 if (m, d) == ("C", "Y") else 0.05))])


def test_holms_correction_spares_a_combination_that_chance_may_have_put_behind():
    # No other combination differs for sure. Alone, this one would be behind.
    rows = rows_of(0.002)
    for each in rows:
        if (each["model"], each["dataset"], each["method"]) == ("A", "X", CANDIDATE):
            behind = (-0.01, -0.013, -0.0105)[each["seed"]]
            each["eval_accuracy"] = row(final=0.7 + NOISE[each["seed"]] + behind)["eval_accuracy"]
    found = group(rows)
    (duel,) = duels([found])
    alone = found.compare(("A", "X"), CANDIDATE, "peer", final)
    assert alone.difference < 0
    assert alone.p < 0.05
    assert duel.behind == []
    assert duel.complete


@pytest.mark.parametrize("missing", ["seed", "combination"])
def test_duel_with_runs_missing_is_not_won(missing):
    rows = rows_of(0.02)
    gone = {"seed": lambda each: each["seed"] == 2, "combination": lambda each: True}[missing]
    rows = [each for each in rows if not (each["method"] == "peer" and each["model"] == "B" and gone(each))]
    (duel,) = duels([group(rows)])
    assert not duel.won
    assert "No verdict yet" in verdict([group(rows)], (1, 21))
    assert "runs missing" in duel_table([group(rows)])


def test_peer_at_its_authors_rate_is_met_at_every_rate():
    rows = []
    for rate in (1e-3, 1e-4):
        for each in rows_of(0.02):
            if each["method"] == CANDIDATE:
                rows.append(each | {"settings": each["settings"] | {"learning_rate": rate}})
    rows += [
        each | {"settings": each["settings"] | {"learning_rate": 2e-3}}
        for each in rows_of(0.02)
        if each["method"] == "peer"
    ]
    found = runs(rows)
    assert [duel.lead.n for duel in duels(groups_of(found, varied_settings(found)))] == [21, 21]


def test_kendalls_tau_of_the_probe_and_of_logme():
    scores = dict(zip(MODELS, range(7), strict=True))
    rows = [
        row(CANDIDATE, model=model, final=0.5 + score / 20, probe_accuracy=score / 10, logme=-score)
        for model, score in scores.items()
    ]
    table = entries(ranking_table([group(rows)]))
    assert table["D"] == ["1.00", "-1.00", "7"]
    assert table["mean"] == ["1.00", "-1.00", ""]
    assert ranking_table([group(rows_of(0.02))]) == ""


def test_corrupted_accuracies_are_means_over_strengths():
    corrupted = {"corruption": ["blur", "blur", "noise", "noise"]}
    rows = [
        row("peer", model=model, final=0.9, corruption_accuracy=[0.5, 0.3, 0.2, 0.0], **corrupted) for model in "ABC"
    ] + [
        row(CANDIDATE, model=model, final=0.9, corruption_accuracy=[0.6, 0.4, 0.3, 0.1], **corrupted)
        for model in "ABC"
    ]
    table = corruption_table([group(rows)])
    assert "| peer | 90.0 | 40.0 | 10.0 | +10.0 ± 0.0, median +10.0, p = " in table
    assert corruption_table([group(rows_of(0.02))]) == ""


@pytest.mark.parametrize(
    ("suite", "said"),
    [
        # Of 24 duels.
        ("contest", "No verdict yet: informed wins 1 of 1 duels, and runs are missing."),
        ("contest_long", "informed wins 1 of 1 duels. The rule of success is about the suite `contest` alone."),
        ("contest_choice", None),
    ],
)
def test_report_holds_the_verdict_except_where_the_candidate_is_chosen(suite, said, tmp_path):
    rows = rows_of(0.02, suite=suite)
    assert is_contest(runs(rows)) is (said is not None)
    page, *_ = write_report([write(rows, tmp_path / "rows.parquet")], tmp_path / "out")
    assert "## The contest" not in page.read_text() if said is None else said in page.read_text()


def test_one_seed_decides_no_duel():
    said = verdict([group(rows_of(0.02, seeds=1))], None)
    assert said.startswith("None of the 1 duels is complete: each needs 3 seeds.")
