"""Result lines in, a folder with a page of tables and pictures out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from entame_hf.plots import save_figures

from . import head_rates, tables
from .figures import model_figures, overview, styles_of
from .findings import findings, provenance
from .runs import Group, groups_of, read_runs, varied_settings

INTRODUCTION = """\
# ENTAME and its peers

Made by `python scripts/reproduce.py report` from lines of `python scripts/reproduce.py run`. Accuracies are those of
the whole test part, in percent. A number in brackets counts seeds, and {missing} stands where there is no run. A ±
of ours is the standard deviation over seeds unless it says otherwise; the paper's are 95 % confidence intervals.
ENTAME is what the paper's tables call MEI+FN, and *keep* trains the head as the model's library initialises it.
"""
NOISE = """\
### Noise in the first error, with Base

The share of the estimates in the energy of the error, at the first training batch, before any update, in percent.

{table}

The paper does not define its percentage: compare orders and directions with it, not digits.
"""
GAIN = """\
### Gain over the first 10 steps

The mean accuracy after each of the first 10 steps, ENTAME's minus Base's: percentage points, paired by seed, with
the 95 % confidence interval and the p-value of the paired t-test.

{table}
"""
CONVERGED = """\
### Accuracy at the end, {dataset}

Of the last evaluation. Bold: the best mean, and those within one standard error of it, paired by seed.

{table}

{verdicts}
"""
VERDICTS = """\
ENTAME against each other method, by paired t-tests: percentage points with their 95 % confidence interval; a
difference is one where p < 0.05 after Holm's correction over the comparisons of this table.

"""
STEPS = """\
### Steps to where others end

The first evaluated step at which ENTAME has the accuracy with which another method ends, over all steps of that
method: median over seeds, with the lower and upper quartile; number of seeds. Nothing is interpolated between
evaluations, which errs against ENTAME. A seed that never gets there counts as ∞, and is counted.

{table}
"""
PICTURES = {
    "accuracy": "Accuracy over the steps",
    "peers": "ENTAME beside other methods",
    "feature_variance": "Variance of the classifier's input",
}
RECOMMENDED = """\
The recipe `recommended` beside the best of all other methods in accuracy at the end: at or above it means within one
standard error of the difference, paired by seed. Over *keep*, runs of the same model, data set and seed are pairs.

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
    points = head_rates.swept(runs)
    identities = set(map(id, points))
    groups = groups_of([run for run in runs if id(run) not in identities], [key for key in varied if key != "head_lr"])
    curves = groups_of(points, [key for key in varied if key not in ("head_lr", "learning_rate")])
    figures: dict[str, Figure | None] = {}
    body = [_section(group, figures, styles_of(groups)) for group in groups]
    body += [_head_rates(groups, curves, figures)]
    if groups:
        figures["overview"] = overview(groups[0])
    shown = ["## What the lines show", _list(findings(groups))]
    body += ["## The runs", _list(provenance(runs))]
    if groups:
        shown.insert(0, _image("Accuracy over the steps, first cells of these lines", "overview"))
    output.mkdir(parents=True, exist_ok=True)
    page = output / "report.md"
    page.write_text(
        "\n\n".join([INTRODUCTION.format(missing=tables.MISSING).strip(), *shown, *filter(None, body)]) + "\n"
    )
    return [page, *(output / name for name in save_figures(figures, output))]


def _section(group: Group, figures: dict[str, Figure | None], styles: dict[str, dict[str, Any]]) -> str:
    """Write the tables of one setting, and draw its pictures."""
    parts = [f"## {group.title[:1].upper()}{group.title[1:]}" if group.title else "## Tables"]
    if "base" in group.methods:
        parts.append(NOISE.format(table=tables.noise_table(group)))
    if {"base", "entame"} <= set(group.methods):
        parts.append(GAIN.format(table=tables.gain_table(group)))
    for dataset in group.datasets:
        verdicts = tables.verdicts(group, dataset)
        said = VERDICTS + _list(verdicts) if verdicts else "No method has two seeds in common with ENTAME."
        parts.append(CONVERGED.format(dataset=dataset, table=tables.converged_table(group, dataset), verdicts=said))
    table = tables.steps_table(group)
    parts += [STEPS.format(table=table)] if table else []
    drawn = {model: model_figures(group, model, styles) for model in group.models}
    for kind, heading in PICTURES.items():
        names = []
        for model in group.models:
            if drawn[model][kind] is not None:
                names.append((model, _file_name(figures, kind, group.title, model)))
                figures[names[-1][1]] = drawn[model][kind]
        if names:
            parts += [f"### {heading}", *(_image(f"{heading}: {model}", name) for model, name in names)]
    return "\n\n".join(part.strip() for part in parts)


def _head_rates(groups: list[Group], curves: list[Group], figures: dict[str, Figure | None]) -> str:
    table = head_rates.recommended_table(groups)
    parts = [RECOMMENDED.format(table=table).strip()] if table else []
    for group in curves:
        for model, dataset in group.cells:
            figure = head_rates.head_rate_curves(group, model, dataset)
            if figure is not None:
                name = _file_name(figures, "head_rates", group.title, model, dataset)
                figures[name] = figure
                parts.append(_image(f"Accuracy over the learning rate of the head: {model} on {dataset}", name))
    return "\n\n".join(["## The learning rate of the head", *parts]) if parts else ""


def _file_name(taken: Iterable[str], *parts: str) -> str:
    """Make a name that a link can hold; labels that differ in nothing but other characters get a number."""
    name = "_".join(
        filter(None, (re.sub(r"[^a-z0-9.]+", "-", part.lower().replace("_", "-")).strip("-.") for part in parts))
    )
    number = sum(other == name or other.startswith(f"{name}~") for other in taken)
    return f"{name}~{number + 1}" if number else name


def _image(text: str, name: str) -> str:
    return f"![{text}]({name}.png)"


def _list(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
