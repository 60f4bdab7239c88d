"""Result lines in, a folder with a page of tables and pictures out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from entame_hf import InputError
from entame_hf.plots import save_figures

from . import deltas, head_rates, one_rate, tables
from .figures import model_figures, overview, styles_of
from .findings import findings, provenance
from .recipes import behind_table, counts_table, leading, leads_table, recipes_of, standings_figure
from .runs import Group, groups_of, read_runs, varied_settings

INTRODUCTION = """\
# ENTAME and its peers

Made by `python scripts/reproduce.py report` from lines of `python scripts/reproduce.py run`. ENTAME is what the
paper's tables call MEI+FN; *keep* trains the head as the model's library initialises it, as most people do today.
"""
FINDINGS = """\
Where ENTAME is ahead of another method or behind it is told by paired t-tests, one a cell: p < 0.05 after Holm's
correction over the cells that are counted. Cells with fewer than three seeds of both are left out. Differences are in
percentage points, with their 95 % confidence intervals."""
READING = f"""\
## How to read the tables

Accuracies are those of the whole test part, in percent. A ± is a 95 % confidence interval by the t distribution over
seeds, of our means and differences as of the paper's means, and left out below three seeds. A number in brackets is
that of seeds, and {tables.MISSING} stands where there is no run. In pictures, bands and error bars are one standard
deviation over seeds around the mean.

- **Accuracy over the first 10 steps**: the mean of the accuracies after each of them, of every method.
- **Accuracy at the end**: of the last evaluation.

  In the tables of accuracies, bold are the best mean and those within one standard error of it, paired by seed."""
READING_OF_ENTAME = """ Below
  each, ENTAME is held against each other method by paired t-tests: ENTAME's accuracy minus the other's in percentage
  points, where both have three seeds. Methods are told apart where p < 0.05 after Holm's correction over the
  comparisons of the table.
- **Noise in the first error**: the share of the estimates in the energy of Base's error, at the first training batch,
  before any update, in percent.
- **Gain over the first 10 steps**: the mean of the accuracies after each of the first 10 steps, ENTAME's minus Base's,
  in percentage points and paired by seed, with the p-value of the paired t-test.
- **Steps to where others end**: the first evaluated step at which ENTAME has the accuracy with which another method of
  the same seed ends, over all steps of that method; the median over seeds, the quartiles, and the number of seeds.
  Nothing is interpolated between evaluations, which errs against ENTAME. A seed that never gets there counts as ∞."""
NOISE_DIFFERS = "The paper does not define its percentage: compare orders and directions with it, not digits."
ACCURACIES = {"Accuracy over the first 10 steps": tables.early, "Accuracy at the end": tables.final}
PICTURES = {
    "accuracy": "Accuracy over the steps",
    "peers": "ENTAME beside other methods",
    "feature_variance": "Variance of the classifier's input",
}
RECIPES = """\
Methods that measure the learning rate of the head, beside the others in accuracy at the end. Counted are the cells, a
model and a data set each, where it is at or above the best of the others, within one standard error of the difference,
paired by seed; then the mean accuracies over these cells.

{table}
"""
BEHIND = """\
Where {recipe} is behind, and by how many percentage points:

{behind}

{recipe} over each other method in accuracy at the end, in percentage points: the mean over cells of the differences
paired by seed, with its 95 % confidence interval, the p-value of its t-test, and the number of cells. One number a
cell is tested: more seeds of a cell say nothing of other cells.

{leads}
"""
RULE = """\
Accuracy at the end with the rate that the rule measured (`head_lr: auto`), beside the best of the rates that were set;
within one standard error of the difference, paired by seed. Which rate is best is read off the same runs.

{table}
"""
DELTAS = """\
The rule's rates are proportional to its δ, how far a step may move a logit, so the rates that were set are those of
other δ: δ(rate) = rate · δ of `auto` ÷ the rate that it measured, which is the geometric mean over seeds. Below is
what each δ costs in accuracy at the end, in percentage points: the best mean over the rates that were set, minus the
mean at the δ's rate, interpolated linearly in log(rate). Each row has the mean over its settings (model, data set,
base rate and method), the largest, and their number. A setting where the δ's rate lies outside of those that were set
is left out, so compare columns of equal numbers.

{table}
"""
ONE_RATE = """\
One rate for all cells, beside a rate of its own for each, measured by the rule: accuracy at the end, the mean over the
cells of a base rate and method. Then by how much the rule's is over the best of those columns, in percentage points
and paired by cell, with its 95 % confidence interval, the p-value of its t-test, and the number of cells; and the mean
of each cell's best rate set. Both bests are read off the same runs, which favours them.

{table}
"""
METHODS = """\
ENTAME over other methods where each has the rule's rate, in percentage points and paired by cell, as above:

{table}
"""


def write_report(results: list[Path], output: Path) -> list[Path]:
    """Write `report.md` and the pictures it shows; the same lines give the same bytes.

    Args:
        results (list of `Path`): files of result lines, of any suites.
        output (`Path`): a folder, which is made where it is missing. Files of these names are replaced.

    Returns:
        `list[Path]`: what was written, the page first.

    Raises:
        [`InputError`]: a file is missing, or a line is none of a run. Nothing is written then.
    """
    runs = read_runs(results)
    varied = varied_settings(runs)
    compared, points = head_rates.split(runs)
    groups = groups_of(compared, varied, beside={"head_lr", "logit_step"})
    curves = groups_of(points, varied, beside={"head_lr", "logit_step", "learning_rate"})
    figures: dict[str, Figure | None] = {}
    if recipes_of(groups):
        shown = [_recipes(groups, figures), READING]
        body = ["\n\n".join([_heading(group), *_accuracies(group)]) for group in groups]
    else:
        shown = _shown(groups, figures) if groups else []
        body = [_section(group, figures, styles_of(groups)) for group in groups]
    body += [_head_rates(curves, figures)]
    top = [INTRODUCTION.strip(), *shown]
    end = ["## The runs", _list(provenance(runs))]
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output} cannot be made: {error.strerror}. Name a folder.") from error
    page = output / "report.md"
    page.write_text("\n\n".join([*top, *filter(None, body), *end]) + "\n", encoding="utf-8")
    return [page, *(output / name for name in save_figures(figures, output))]


def _shown(groups: list[Group], figures: dict[str, Figure | None]) -> list[str]:
    """Draw the first glance, and say what the lines show of ENTAME, where they have it."""
    if not any("entame" in group.methods for group in groups):
        return [READING]
    picture = _picture(figures, overview(groups[0], styles_of(groups)), "Accuracy over the steps", "overview")
    return [picture, "## What the lines show", _list(findings(groups)), FINDINGS, READING + READING_OF_ENTAME]


def _recipes(groups: list[Group], figures: dict[str, Figure | None]) -> str:
    """Put recipes beside their peers, and the one that stands best more closely."""
    recipe = leading(groups)
    text = f"Accuracy at the end of {recipe} and of other methods"
    closely = BEHIND.format(recipe=recipe, behind=behind_table(groups, recipe), leads=leads_table(groups, recipe))
    return "\n\n".join(
        [
            _picture(figures, standings_figure(groups, recipe), text, "overview"),
            "## Recipes",
            RECIPES.format(table=counts_table(groups)).strip(),
            closely.strip(),
        ]
    )


def _section(group: Group, figures: dict[str, Figure | None], styles: dict[str, dict[str, Any]]) -> str:
    """Write the tables of one setting, and draw its pictures."""
    parts = [_heading(group)]
    if "base" in group.methods:
        parts += ["### Noise in the first error", tables.noise_table(group), NOISE_DIFFERS]
    if {"base", "entame"} <= set(group.methods):
        parts += ["### Gain over the first 10 steps", tables.gain_table(group)]
    parts += _accuracies(group, verdicts=True)
    steps = tables.steps_table(group)
    parts += ["### Steps to where others end", steps] if steps else []
    drawn = {model: model_figures(group, model, styles) for model in group.models}
    for kind, heading in PICTURES.items():
        if kind == "peers" and "entame" not in group.methods:
            heading = "Methods beside each other"
        pictures = [
            _picture(figures, figure, f"{heading}: {model}", kind, group.title, model)
            for model in group.models
            if (figure := drawn[model][kind]) is not None
        ]
        parts += [f"### {heading}", *pictures] if pictures else []
    return "\n\n".join(filter(None, parts))


def _heading(group: Group) -> str:
    return f"## Runs with {group.title}" if group.title else "## Tables"


def _accuracies(group: Group, verdicts: bool = False) -> list[str]:
    """Write the accuracies of one setting, and where ENTAME is above and below others in them."""
    parts = []
    for heading, measure in ACCURACIES.items():
        for dataset in group.datasets:
            parts += [f"### {heading}, {dataset}", tables.accuracy_table(group, dataset, measure)]
            parts += [_list(tables.verdicts(group, dataset, measure))] if verdicts else []
    return parts


def _head_rates(curves: list[Group], figures: dict[str, Figure | None]) -> str:
    rule = head_rates.rule_table(curves)
    parts = [RULE.format(table=rule).strip()] if rule else []
    single = one_rate.one_rate_table(curves)
    parts += [ONE_RATE.format(table=single).strip()] if single else []
    beside = one_rate.methods_table(curves)
    parts += [METHODS.format(table=beside).strip()] if beside else []
    costs = deltas.delta_table(curves)
    parts += [DELTAS.format(table=costs).strip()] if costs else []
    for group in curves:
        for method in one_rate.methods_of(group):
            figure = one_rate.one_rate_figure(group, method)
            if figure is not None:
                text = f"Accuracy of all models over the learning rate of the head: {method}"
                parts.append(_picture(figures, figure, text, "all_models", group.title, method))
        for model, dataset in group.cells:
            figure = head_rates.head_rate_curves(group, model, dataset)
            if figure is not None:
                text = f"Accuracy over the learning rate of the head: {model} on {dataset}"
                parts.append(_picture(figures, figure, text, "head_rates", group.title, model, dataset))
    return "\n\n".join(["## The learning rate of the head", *parts]) if parts else ""


def _picture(figures: dict[str, Figure | None], figure: Figure, text: str, *labels: str) -> str:
    """Keep a figure under a name made of labels, and write the link to it."""
    name = "_".join(re.sub(r"[^a-z0-9.]+", "-", label.lower()).strip("-.") for label in labels if label)
    # Labels may differ in other characters alone.
    while name in figures:
        name += "-"
    figures[name] = figure
    return f"![{text}]({name}.png)"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
