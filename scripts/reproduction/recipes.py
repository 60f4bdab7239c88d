"""Recipes that measure the head's rate, beside what else is done with a new head at several base rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .figures import plain
from .runs import Group, name_of, natural
from .statistics import Values, paired, within_one_error
from .tables import MISSING, compare, difference, early, final, markdown, mean, tested

RECIPE = "#D55E00"
KEEP = "#000000"
OTHER = "0.72"


@dataclass(frozen=True)
class Standing:
    """A recipe in one cell of a group, and the best of its peers there: the methods that measure no rate."""

    group: Group
    model: str
    dataset: str
    recipe: str
    ours: Values
    peers: dict[str, Values]

    @property
    def best(self) -> str:
        return max(self.peers, key=lambda method: mean(self.peers[method]))

    @property
    def reached(self) -> bool:
        """Whether it is at or above the best, within one standard error of the difference paired by seed."""
        return within_one_error(self.peers[self.best], self.ours)


def recipes_of(groups: Sequence[Group]) -> list[str]:
    """Find the methods that measured the head's rate, where there are others to put beside them."""
    runs = [run for group in groups for run in group.runs]
    measured = {run.method for run in runs if run.head_lr is not None}
    others = {run.method for run in runs} - measured
    return sorted(measured, key=natural) if others else []


def standings(groups: Sequence[Group], recipe: str) -> Iterator[Standing]:
    """Compare a recipe with its peers in accuracy at the end, cell by cell."""
    recipes = recipes_of(groups)
    for group in groups:
        peers = [method for method in group.methods if method not in recipes]
        for model, dataset in group.cells:
            found = {method: group.values(model, dataset, method, final) for method in peers}
            found = {method: values for method, values in found.items() if values}
            ours = group.values(model, dataset, recipe, final)
            if ours and found:
                yield Standing(group, model, dataset, recipe, ours, found)


def leading(groups: Sequence[Group]) -> str:
    """Name the recipe that is not behind in the most cells, and of such the one that ends highest."""

    def standing(recipe: str) -> tuple[int, float]:
        found = [*standings(groups, recipe)]
        return sum(it.reached for it in found), sum(mean(it.ours) for it in found)

    return max(recipes_of(groups), key=standing)


def counts_table(groups: Sequence[Group]) -> str:
    """Count for each recipe the cells where it is at or above the best of its peers, one column a setting.

    Returns:
        `str`: a table, with the mean accuracies at the end and over the first ten steps of the same cells; or nothing
        where there is no recipe.
    """
    rows = []
    for recipe in recipes_of(groups):
        found = [*standings(groups, recipe)]
        by_group = [[it.reached for it in found if it.group is group] for group in groups]
        first = [it.group.values(it.model, it.dataset, recipe, early) for it in found]
        rows.append(
            [
                recipe,
                *(f"{sum(reached)} of {len(reached)}" for reached in by_group),
                f"**{sum(it.reached for it in found)} of {len(found)}**",
                _mean([mean(it.ours) for it in found]),
                _mean([mean(values) for values in first if values]),
            ]
        )
    header = ["", *(group.title for group in groups), "all", "at the end", "first 10 steps"]
    return markdown(header, rows) if rows else ""


def behind_table(groups: Sequence[Group], recipe: str) -> str:
    """Name the cells where a recipe is behind the best of its peers."""
    rows = []
    for group in groups:
        cells = [*standings([group], recipe)]
        if cells:
            rows.append([group.title, "; ".join(_behind(it) for it in cells if not it.reached) or "none"])
    return markdown(["", "behind"], rows)


def leads_table(groups: Sequence[Group], recipe: str) -> str:
    """Test a recipe's accuracy at the end against each other method over the cells, one row a method.

    Tested are the cells' mean differences: runs of one cell are alike, and no evidence of their own for others.
    """
    others = dict.fromkeys(method for group in groups for method in group.methods if method != recipe)
    rows = [[name_of(method), *(_lead(group, recipe, method) for group in groups)] for method in others]
    return markdown([f"{recipe} over", *(group.title for group in groups)], rows)


def standings_figure(groups: Sequence[Group], recipe: str) -> Figure:
    """Draw the accuracy at the end of a recipe and its peers: a panel a setting, a row a cell."""
    found = [*standings(groups, recipe)]
    rows = list(dict.fromkeys((it.model, it.dataset) for it in found))
    figure = Figure(figsize=(4 * len(groups), 1.2 + 0.24 * len(rows)), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        for it in (it for it in found if it.group is group):
            place = rows.index((it.model, it.dataset))
            for method, values in it.peers.items():
                keeps = method == "keep"
                axes.plot(mean(values), place, "o", ms=5, color=KEEP if keeps else OTHER, zorder=3 if keeps else 2)
            axes.plot(mean(it.ours), place, "D", ms=5.5, color=RECIPE, zorder=4)
        axes.set(title=plain(group.title), xlabel="accuracy at the end, percent")
        axes.set_yticks(range(len(rows)), [f"{model}, {dataset}" for model, dataset in rows])
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # Rows of one model stand together.
        for place in range(1, len(rows)):
            if rows[place][0] != rows[place - 1][0]:
                axes.axhline(place - 0.5, color="0.9", linewidth=0.8, zorder=0)
    # The first row at the top, and room for the markers of the outer ones, however few rows there are.
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    handles = [
        Line2D([], [], marker="D", linestyle="", color=RECIPE, label=recipe),
        Line2D([], [], marker="o", linestyle="", color=KEEP, label="keep"),
        Line2D([], [], marker="o", linestyle="", color=OTHER, label="other methods"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def _behind(it: Standing) -> str:
    comparison = compare(it.group, it.model, it.dataset, it.recipe, it.best, final)
    by = "" if comparison is None else f" {difference(comparison)}"
    return f"{it.model}, {it.dataset}: {name_of(it.best)}{by}"


def _lead(group: Group, recipe: str, method: str) -> str:
    found = {cell: compare(group, *cell, recipe, method, final) for cell in group.cells}
    differences = {cell: it.difference for cell, it in found.items() if it is not None}
    comparison = paired(differences, dict.fromkeys(differences, 0.0))
    return MISSING if comparison is None else tested(comparison)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else MISSING
