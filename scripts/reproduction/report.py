"""Write a report: result rows in, one page of tables and its picture out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from entame_hf import InputError
from entame_hf.plots import save_figures

from . import contest, head_rates, recipes, tables
from .figures import head_rate_figure, overview, styles_of
from .groups import Group, Run, early, final, groups_of, natural, read_runs, varied_settings
from .suite import read_suite

INTRODUCTION = """\
Drawn from result rows by `{command}`.

*keep* trains the head that the model's library draws, with the settings of the run. ENTAME is MEI+FN in the paper's
tables. A combination is one model on one dataset."""
READING = f"""\
## How to read the tables

Accuracies are in percent. A ± is a 95 % confidence interval by the t distribution over seeds, left out below three
seeds. The number of seeds stands in brackets, and {tables.MISSING} where there is no run. "First 10 steps" is the mean
of the accuracies after each of the first 10 steps, "at the end" the last evaluation. Bold are the best mean and those
within one standard error of it, paired by seed. Differences are in percentage points."""
ENTAME = """\
### ENTAME and each other method

Means over combinations. "ENTAME's lead" is the range of its mean lead over combinations. The last column counts the
combinations where it is ahead, behind, or neither, by paired t-tests over seeds (p < 0.05 after Holm's correction)."""
NOISE = """\
### Noise in the first error

The share of the estimates in the energy of Base's error at the first training batch, before any update, in percent.
The paper does not define its percentage: compare orders and directions, not digits."""
RECIPES = """\
## Recipes

A recipe is a method that measures the head learning rate. The table counts the combinations where it is at or above
the best of the other methods, within one standard error of the difference, paired by seed. Then come its mean
accuracies there.

{counts}

Where {recipe} is behind its best peer, and by how many percentage points:

{behind}

Mean accuracy over combinations:

{means}

Lead of {recipe} at the end: the mean over combinations with its 95 % confidence interval, the median, the p-value of
the t-test over combinations, and their number.

{leads}
"""
CONTEST = """\
## The contest

{verdict}

The rule was written before the runs. {candidate} succeeds if it wins each duel with a peer at a learning rate: the
mean of its lead over combinations is above zero with p < 0.05 (t-test paired by combination), and it is significantly
behind on no combination (t-tests paired by seed, p < 0.05 after Holm's correction over combinations). Medians and the
table of each method at its own best learning rate stand beside it. A method that makes a pass over the images before
training trains for a third of an epoch less.

{duels}

Mean accuracy over combinations:

{means}
"""
RANKING = """\
How well the order of models by the leave-one-out accuracy of a linear probe, and by LogME, agrees with their best
accuracy after fine-tuning, of all methods and learning rates:"""
CORRUPTION = """\
Accuracy on the corrupted test split, mean over three strengths and over combinations:"""
OWN_BEST = """\
Each method at its own best of these settings on every combination. The last row takes the best of all other methods
and settings. The same runs choose the best, which favours the last row.

{own_best}
"""
HEAD_RATES = {
    "one rate": """\
One head learning rate for all combinations, beside the rule's own for each: mean accuracy at the end. Then the rule's
lead over the best column, paired by combination, with its 95 % confidence interval, p-value and number; and the mean
of each combination's best. The same runs choose both bests, which favours them.""",
    "methods": """\
ENTAME's lead over other methods where each has the rule's rate, paired by combination:""",
    "deltas": """\
What each δ costs at the end, in percentage points: the best mean over the head learning rates that were set, minus the
mean at the δ's rate, interpolated linearly in log(rate). A row has the mean over its sweeps, the largest, and their
number. A sweep whose rates do not reach the δ's is left out, so compare columns with equal numbers.""",
    "rule": """\
Accuracy at the end with the rate that the rule measured (`head_lr: auto`), beside the best of the rates that were set,
which is chosen by the same runs:""",
}


def write_report(results: list[Path], output: Path) -> list[Path]:
    """Write `report.md` and its picture; return their paths. The same rows give the same page."""
    runs = read_runs(results)
    varied = varied_settings(runs)
    compared, swept = head_rates.split(runs)
    groups = groups_of(compared, varied, beside={"head_lr", "logit_step"})
    curves = groups_of(swept, varied, beside={"head_lr", "logit_step", "learning_rate"})
    figure: Figure | None = None
    page = _head_rates(curves)
    if recipes.recipes_of(groups):
        contested = contest.is_contest(runs)
        recipe = contest.CANDIDATE if contested else recipes.leading(groups)
        figure = recipes.standings_figure(groups, recipe, contested)
        page = [*(_contest(groups, runs) if contested else _recipes(groups, recipe)), *page]
    elif any("entame" in group.methods for group in groups):
        figure = overview(groups[0], styles_of(groups))
    elif len(curves) == 1:
        figure = head_rate_figure(curves[0])
    if figure is not None:
        page = ["![Accuracy](overview.png)", *page]
    for group in groups:
        page += _tables(group)
    command = f"reproduce.py report --results {' '.join(path.name for path in results)}"
    page = [f"# {output.name}", INTRODUCTION.format(command=command), *page, READING, "## The runs", _provenance(runs)]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output} cannot be made: {error.strerror}. Name a folder.") from error
    (output / "report.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
    return [output / "report.md", *(output / name for name in save_figures({"overview": figure}, output))]


def _recipes(groups: Sequence[Group], recipe: str) -> list[str]:
    texts = {
        "counts": recipes.counts_table(groups),
        "behind": recipes.behind_table(groups, recipe),
        "means": recipes.means_table(groups),
        "leads": recipes.leads_table(groups, recipe),
    }
    return [RECIPES.format(recipe=recipe, **texts).strip(), *_own_best(groups, recipe)]


def _contest(groups: Sequence[Group], runs: Sequence[Run]) -> list[str]:
    test = read_suite(contest.TEST)
    wanted = (len(test.methods) - 1) * len(test.grid["learning_rate"]), len(test.models) * len(test.datasets)
    is_test = {run.row["suite"] for run in runs} == {contest.TEST}
    texts = {
        "verdict": contest.verdict(groups, wanted if is_test else None),
        "duels": contest.duel_table(groups),
        "means": recipes.means_table(groups),
    }
    page = [CONTEST.format(candidate=contest.CANDIDATE, **texts).strip(), *_own_best(groups, contest.CANDIDATE)]
    more = {RANKING: contest.ranking_table(groups), CORRUPTION: contest.corruption_table(groups)}
    return page + [part for text, table in more.items() if table for part in (text, table)]


def _own_best(groups: Sequence[Group], recipe: str) -> list[str]:
    return [OWN_BEST.format(own_best=recipes.own_best_table(groups, recipe)).strip()] if len(groups) > 1 else []


def _head_rates(curves: Sequence[Group]) -> list[str]:
    found = head_rates.sweeps(curves)
    texts = {
        "one rate": head_rates.one_rate_table(found),
        "methods": head_rates.methods_table(curves),
        "deltas": head_rates.delta_table(found),
        "rule": head_rates.rule_table(found),
    }
    page = [part for name, table in texts.items() if table for part in (HEAD_RATES[name], table)]
    return ["## The head learning rate", *page] if page else []


def _tables(group: Group) -> list[str]:
    page = [f"## Runs with {group.title}"] if group.title else []
    if "entame" in group.methods and len(group.methods) > 1 and not recipes.recipes_of([group]):
        page += [ENTAME, tables.entame_table(group)]
    if "base" in group.methods:
        page += [NOISE, tables.noise_table(group)]
        if "entame" in group.methods:
            page += ["### ENTAME's gain over Base in the first 10 steps", tables.gain_table(group)]
    for heading, of in {"first 10 steps": early, "at the end": final}.items():
        for dataset in group.datasets:
            page += [f"### Accuracy, {heading}, {dataset}", tables.accuracy_table(group, dataset, of)]
    return page


def _provenance(runs: Sequence[Run]) -> str:
    """Say how many runs there are, where they ran, with which versions, and how long they took."""
    seeds = Counter((*run.combination, run.method, str(run.settings)) for run in runs).values()
    said = [f"{len(runs):,} runs; seeds of each: {_listed(map(str, seeds))}."]
    for device in sorted({run.row["device"] for run in runs}):
        here = [run.row for run in runs if run.row["device"] == device]
        # Runs that share a device share its time.
        took = sum(row["seconds"] / row["processes"] for row in here)
        said.append(
            f"{device}: {len(here):,} runs in {took / 60:,.1f} minutes of the device, "
            f"{_listed(str(row['processes']) for row in here)} at a time."
        )
    names = sorted({name for run in runs for name in run.row["versions"]})
    versions = (f"{name} {_listed(run.row['versions'].get(name, '') for run in runs)}" for name in names)
    said += [f"Versions: {', '.join(versions)}.", f"Commits: {_listed(run.row['commit'] or '' for run in runs)}."]
    said += [f"`{command}`" for command in sorted({run.row["command"] for run in runs})]
    return "\n".join(f"- {each}" for each in said)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values) - {""}, key=natural)) or "unknown"
