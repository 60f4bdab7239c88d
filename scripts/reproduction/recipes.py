"""Recipes, which are methods that measure the head learning rate, beside their peers at several learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .groups import Combination, Group, Measure, early, final, mean, name_of, natural
from .significance import Values, paired, within_one_error
from .tables import MISSING, difference, lead_entry, markdown

RECIPE = "#D55E00"
KEEP = "#000000"
OTHER = "0.72"
# Keep with all that `recommended` sets beside the head, in recipe_parts: a recipe too, and the fairest peer.
FAIR, FAIR_COLOUR, FAIR_LABEL = (
    "keep, auto, frozen and its schedule",
    "#0072B2",
    "keep with all settings of recommended",
)


@dataclass(frozen=True)
class Standing:
    """A recipe's final accuracies on one combination of a group, and those of its peers, which measure no rate."""

    group: Group
    combination: Combination
    recipe: str
    ours: Values
    peers: dict[str, Values]

    @property
    def best(self) -> str:
        return max(self.peers, key=lambda method: mean(self.peers[method]))

    @property
    def reached(self) -> bool:
        """Return whether the recipe is at or above its best peer, within one standard error, paired by seed."""
        return within_one_error(self.peers[self.best], self.ours)


def recipes_of(groups: Sequence[Group]) -> list[str]:
    """Return the methods that measured the head learning rate, if other methods ran beside them."""
    runs = [run for group in groups for run in group.runs]
    measured = {run.method for run in runs if run.head_lr is not None}
    others = {run.method for run in runs} - measured
    return sorted(measured, key=natural) if others else []


def standings(groups: Sequence[Group], recipe: str, everyone: bool = False) -> Iterator[Standing]:
    """Compare a recipe with its peers, or with all methods, in accuracy at the end, combination by combination."""
    recipes = [recipe] if everyone else recipes_of(groups)
    for group in groups:
        peers = [method for method in group.methods if method not in recipes]
        for combination in group.combinations:
            found = {method: group.values(combination, method, final) for method in peers}
            found = {method: values for method, values in found.items() if values}
            ours = group.values(combination, recipe, final)
            if ours and found:
                yield Standing(group, combination, recipe, ours, found)


def leading(groups: Sequence[Group]) -> str:
    """Return the recipe that reaches its best peer most often; of equal ones, the one that ends highest."""

    def standing(recipe: str) -> tuple[int, float]:
        found = [*standings(groups, recipe)]
        return sum(it.reached for it in found), sum(mean(it.ours) for it in found)

    return max(recipes_of(groups), key=standing)


def counts_table(groups: Sequence[Group]) -> str:
    """Count for each recipe the combinations where it reaches its best peer, one column a group."""
    rows = []
    for recipe in recipes_of(groups):
        found = [*standings(groups, recipe)]
        by_group = [[it.reached for it in found if it.group is group] for group in groups]
        counts = [f"{sum(reached)} of {len(reached)}" for reached in by_group]
        total = f"**{sum(it.reached for it in found)} of {len(found)}**"
        rows.append([recipe, *counts, total, *(_mean_where(found, recipe, of) for of in (final, early))])
    return markdown(["", *(group.title for group in groups), "all", "at the end", "first 10 steps"], rows)


def behind_table(groups: Sequence[Group], recipe: str) -> str:
    """Name the combinations where a recipe is behind its best peer, and by how much."""
    rows = []
    for group in groups:
        found = [*standings([group], recipe)]
        if found:
            rows.append([group.title, "; ".join(_behind(it) for it in found if not it.reached) or "none"])
    return markdown(["", "behind"], rows)


def means_table(groups: Sequence[Group]) -> str:
    """Show each method's mean accuracies, over the first ten steps and at the end: one column a group."""
    rows = [
        [name_of(method), *(f"{_mean(group, method, early)}, {_mean(group, method, final)}" for group in groups)]
        for method in _methods(groups)
    ]
    return markdown(["first 10 steps, at the end", *(group.title for group in groups)], rows)


def leads_table(groups: Sequence[Group], recipe: str) -> str:
    """Test a recipe's lead at the end over each other method: one row a method, one column a group.

    One number a combination is tested: more seeds of a combination say nothing about other combinations.
    """
    rows = [
        [name_of(method), *(_lead(group, recipe, method) for group in groups)]
        for method in _methods(groups)
        if method != recipe
    ]
    return markdown([f"{recipe} over", *(group.title for group in groups)], rows)


def own_best_table(groups: Sequence[Group], recipe: str) -> str:
    """Compare methods where each takes its best group on every combination, such as its best learning rate.

    The last row takes the best of the others on each combination.
    """
    best: dict[str, dict[Combination, float]] = {}
    for method in _methods(groups):
        found = [group.means(method, final) for group in groups]
        best[name_of(method)] = {
            each: max(means[each] for means in found) for each in found[0] if all(each in means for means in found)
        }
    ours = best[name_of(recipe)]
    others = [values for values in best.values() if values is not ours]
    best["best of the others"] = {each: max(values[each] for values in others if each in values) for each in ours}
    leads = {n: "" if values is ours else lead_entry(paired(ours, values), median=True) for n, values in best.items()}
    rows = [[n, f"{mean(values):.1f}" if values else MISSING, leads[n]] for n, values in best.items()]
    return markdown(["", "at the end", f"{recipe}'s lead"], rows)


def standings_figure(groups: Sequence[Group], recipe: str, everyone: bool = False) -> Figure:
    """Draw final accuracies of a recipe and its peers, or of all methods: a panel a group, a row a combination.

    One of the others has a mark of its own: the peer with the recipe's schedule, or `recommended` among all methods.
    """
    found = [*standings(groups, recipe, everyone)]
    beside, beside_label = ("recommended", "recommended") if everyone else (FAIR, FAIR_LABEL)
    rows = list(dict.fromkeys(it.combination for it in found))
    figure = Figure(figsize=(4 * len(groups), 1.2 + 0.24 * len(rows)), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        for it in (it for it in found if it.group is group):
            place = rows.index(it.combination)
            for method, values in it.peers.items():
                keeps = method == "keep"
                axes.plot(mean(values), place, "o", ms=5, color=KEEP if keeps else OTHER, zorder=3 if keeps else 2)
            if values := it.group.values(it.combination, beside, final):
                axes.plot(mean(values), place, "s", ms=4.5, color=FAIR_COLOUR, zorder=3)
            axes.plot(mean(it.ours), place, "D", ms=5.5, color=RECIPE, zorder=4)
        axes.set(title=group.plain_title, xlabel="accuracy at the end, percent")
        axes.set_yticks(range(len(rows)), [", ".join(row) for row in rows])
        axes.grid(axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        # Rows of one model stand together.
        for place in range(1, len(rows)):
            if rows[place][0] != rows[place - 1][0]:
                axes.axhline(place - 0.5, color="0.9", linewidth=0.8, zorder=0)
    # The first row at the top, with room for the markers of the outer rows.
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    methods = {method for group in groups for method in group.methods}
    marks = {recipe: ("D", RECIPE)}
    marks |= {beside_label: ("s", FAIR_COLOUR)} if beside in methods else {}
    marks |= {"keep": ("o", KEEP)} if "keep" in methods else {}
    marks["other methods"] = ("o", OTHER)
    handles = [Line2D([], [], marker=m, linestyle="", color=c, label=label) for label, (m, c) in marks.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def _methods(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(method for group in groups for method in group.methods))


def _mean_where(found: Sequence[Standing], recipe: str, of: Measure) -> str:
    values = [values for it in found if (values := it.group.values(it.combination, recipe, of))]
    return f"{sum(map(mean, values)) / len(values):.1f}" if values else MISSING


def _mean(group: Group, method: str, of: Measure) -> str:
    means = group.means(method, of)
    return f"{mean(means):.1f}" if means else MISSING


def _behind(it: Standing) -> str:
    comparison = it.group.compare(it.combination, it.recipe, it.best, final)
    by = "" if comparison is None else f" {difference(comparison)}"
    return f"{', '.join(it.combination)}: {name_of(it.best)}{by}"


def _lead(group: Group, recipe: str, method: str) -> str:
    found = {each: group.compare(each, recipe, method, final) for each in group.combinations}
    return lead_entry(paired({each: it.difference for each, it in found.items() if it is not None}), median=True)
