"""Runs beside each other: where their recipes differ, and which is better where that can be said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.monitor.run_view import RunView
from rlhf_megatron.recipe.differences import differing_values, shown_value


@dataclass(frozen=True)
class Differences:
    """Differences of recipes: the columns' labels, and (key, each one's value)."""

    labels: list[str]
    rows: list[tuple[str, list[str]]]


def recipe_differences(runs: Sequence[RunView]) -> Differences:
    """Return the keys in which the recipes of runs differ, and the versions of a run's own recipe."""
    columns = [
        (" ".join(filter(None, [run.label if len(runs) > 1 else "", steps])), recipe)
        for run in runs
        for steps, recipe in run.recipes
    ]
    rows = differing_values([recipe for _, recipe in columns])
    return Differences([label for label, _ in columns], [(key, [_in_cell(each) for each in of]) for key, of in rows])


def _in_cell(value: Any) -> str:
    return "{...}" if isinstance(value, Mapping) else shown_value(value)


@dataclass(frozen=True)
class Compared:
    """One headline of several runs: each one's value, NaN where it has none, and the places of the best."""

    label: str
    values: list[float]
    best: list[int]


# Numbers of runs that differ in one of these are of other batches or questions: neither is the better one.
_SAME = ("loop", "data", "batch", "reward", "evaluation")


def apart(runs: Sequence[RunView]) -> list[str]:
    """Return the sections of the recipes by which the runs' batches differ; seeds draw the same rows in another
    order."""
    return [key for key in _SAME if any(run.recipe.get(key) != runs[0].recipe.get(key) for run in runs)]


def compared(runs: Sequence[RunView]) -> list[Compared]:
    """Return the headlines of several runs beside each other; the best is marked where more, or less, is better, and
    batches are equal."""
    if len(runs) == 1:
        return []
    rows, unequal = [], apart(runs)
    for label in dict.fromkeys(headline.label for run in runs for headline in run.headlines):
        of_runs = [{each.label: each for each in run.headlines}.get(label) for run in runs]
        better = next(each.better for each in of_runs if each)
        known = [each.last for each in of_runs if each]
        top = (max(known) if better > 0 else min(known)) if better and len(set(known)) > 1 and not unequal else None
        best = [index for index, each in enumerate(of_runs) if each and each.last == top]
        rows.append(Compared(label, [each.last if each else math.nan for each in of_runs], best))
    return rows
