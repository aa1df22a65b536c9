"""Runs beside each other: where their recipes differ, and which is better where that can be said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.monitor.run_view import Headline, RunView
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
    """One headline of several runs: each one's value, NaN where it has none, and the places of the best.

    Values are those of the newest step that all have, else each one's last; of speeds the medians.
    """

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
        first = next(each for each in of_runs if each)
        step = None if first.is_speed else _newest_common_step(runs, of_runs)
        values = [_value(run, each, step) for run, each in zip(runs, of_runs, strict=True)]
        known = {value for value in values if not math.isnan(value)}
        is_fair = bool(first.better) and (first.is_speed or step is not None) and not unequal
        top = (max(known) if first.better > 0 else min(known)) if is_fair and len(known) > 1 else None
        rows.append(Compared(label, values, [index for index, value in enumerate(values) if value == top]))
    return rows


def _newest_common_step(runs: Sequence[RunView], of_runs: Sequence[Headline | None]) -> int | None:
    """Return the newest step of which all runs that have a headline have its metric."""
    steps = [set(run.series[each.metric][0]) for run, each in zip(runs, of_runs, strict=True) if each]
    return max(set.intersection(*steps), default=None)


def _value(run: RunView, headline: Headline | None, step: int | None) -> float:
    if headline is None:
        return math.nan
    return headline.last if step is None else dict(zip(*run.series[headline.metric], strict=True))[step]
