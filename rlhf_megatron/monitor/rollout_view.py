"""Kept rows as a person looks for them: filters, groups by prompt, a prompt over the steps, several runs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.kept_files import KeptRow, Kind, kept_steps, read_rows
from rlhf_megatron.redaction import hide_secrets
from rlhf_megatron.untrusted import shown

GROUPS_ON_A_PAGE, RESPONSES_OF_A_GROUP = 6, 16
STEPS_OF_A_PROMPT = 60
BARS = 12
MOST_SOURCES = 100
_Number = TypeVar("_Number", int, float)
_KEY = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Filters:
    """The rows that are shown; None lets everything through."""

    kind: Kind = "training"
    step: int | None = None
    prompt: str | None = None
    source: str | None = None
    lowest: float | None = None
    highest: float | None = None
    shortest: float | None = None
    longest: float | None = None
    only: str | None = None
    page: int = 1

    def address(self, **changes: Any) -> str:
        """Return the query of an address that shows these rows but for some changes, from the first page on."""
        values = replace(self, **{"page": 1, **changes})
        return "?" + urlencode({name: value for name, value in vars(values).items() if value is not None})

    def lets_through(self, row: KeptRow) -> bool:
        """Return whether a row is shown."""
        return (
            (self.source is None or row.data_source == self.source)
            and (self.only is None or row.wrong == (self.only == "wrong"))
            and _within(row.reward, self.lowest, self.highest)
            and _within(row.length, self.shortest, self.longest)
        )


@dataclass(frozen=True)
class Bar:
    """One bar of the rewards: all rows and those that filters let through; heights are shares of the highest bar's."""

    label: str
    rows: int
    chosen: int
    height: float
    chosen_height: float


@dataclass(frozen=True)
class PromptGroup:
    """The responses to one prompt at one step."""

    prompt: str
    key: str
    step: int
    data_source: str
    ground_truth: str
    right: int | None
    rows: list[KeptRow]
    left_out: int


@dataclass(frozen=True)
class RunRows:
    """One run's part of the view."""

    label: str
    rows: int
    chosen: int
    mean: float | None
    bars: list[Bar]
    groups: list[PromptGroup]
    problems: list[str]


@dataclass(frozen=True)
class RolloutsView:
    """Content of the rollout browser."""

    filters: Filters
    steps: list[int]
    sources: list[str]
    pages: int
    runs: list[RunRows]
    kinds: list[Kind] = field(default_factory=lambda: ["training", "evaluation"])


def filters_of(query: Mapping[str, str]) -> Filters:
    """Return the filters of an address; empty values count as absent. Raises MonitorError naming one that is wrong."""
    given = {name: value.strip() for name, value in query.items() if value.strip()}
    kind, prompt, only = given.get("kind", "training"), given.get("prompt"), given.get("only")
    if kind not in ("training", "evaluation"):
        raise MonitorError(f"kind={shown(kind, 40)}: is training or evaluation")
    if prompt is not None and not _KEY.fullmatch(prompt):
        raise MonitorError(f"prompt={shown(prompt, 40)}: names no prompt")
    if only not in (None, "wrong", "right"):
        raise MonitorError(f"only={shown(only, 40)}: is wrong or right")
    numbers = {name: _parsed(name, given[name], float) for name in _RANGES if name in given}
    step = _parsed("step", given["step"], int) if "step" in given else None
    page = _parsed("page", given.get("page", "1"), int)
    return Filters(
        "evaluation" if kind == "evaluation" else "training",
        step,
        prompt,
        given.get("source"),
        only=only,
        page=max(1, page),
        **numbers,
    )


_RANGES = ("lowest", "highest", "shortest", "longest")


def _parsed(name: str, text: str, kind: Callable[[str], _Number]) -> _Number:
    try:
        value = kind(text[:40])
        if not math.isfinite(value) or abs(value) > 1e18:
            raise ValueError
    except ValueError:
        raise MonitorError(f"{name}={shown(text, 40)}: is no number") from None
    return value


def rollouts_view(runs: Mapping[str, tuple[Path, float | None]], filters: Filters) -> RolloutsView:
    """Return the rows of runs, label -> (folder, correct_from), that filters let through.

    Without a step the newest one is shown; a prompt is shown over its newest STEPS_OF_A_PROMPT steps.
    """
    of_runs = {label: kept_steps(folder, filters.kind) for label, (folder, _) in runs.items()}
    steps = sorted(set(itertools.chain(*of_runs.values())))
    if filters.step is None and steps and filters.prompt is None:
        # The newest that all of them have, so that rows of one step lie beside each other.
        common = set(steps).intersection(*(kept for kept in of_runs.values() if kept))
        filters = replace(filters, step=max(common or steps))
    read = {label: _read(folder, right, of_runs[label], filters) for label, (folder, right) in runs.items()}
    everything = [row for rows, _ in read.values() for row in rows]
    sources = sorted({row.data_source for row in everything if row.data_source})[:MOST_SOURCES]
    edges = _edges([row.reward for row in everything if row.reward is not None])
    grouped = {label: _groups([row for row in rows if filters.lets_through(row)]) for label, (rows, _) in read.items()}
    order = list(dict.fromkeys((group.step, group.key) for groups in grouped.values() for group in groups))
    pages = max(1, math.ceil(len(order) / GROUPS_ON_A_PAGE))
    page = min(filters.page, pages)
    chosen = order[(page - 1) * GROUPS_ON_A_PAGE : page * GROUPS_ON_A_PAGE]
    parts = []
    for label, (rows, problems) in read.items():
        by_key = {(group.step, group.key): group for group in grouped[label]}
        parts.append(_run_rows(label, rows, problems, filters, edges, [by_key[key] for key in chosen if key in by_key]))
    return RolloutsView(replace(filters, page=page), steps, sources, pages, parts)


def _read(
    folder: Path, correct_from: float | None, steps: Sequence[int], filters: Filters
) -> tuple[list[KeptRow], list[str]]:
    if filters.prompt is not None:
        wanted = list(steps)[-STEPS_OF_A_PROMPT:]
    else:
        wanted = [step for step in steps if step == filters.step]
    rows: list[KeptRow] = []
    problems = []
    for step in wanted:
        try:
            rows += read_rows(folder, filters.kind, step, correct_from, filters.prompt)
        except MonitorError as error:
            problems.append(shown(error, 300))
    return [_without_secrets(row) for row in rows], problems


def _without_secrets(row: KeptRow) -> KeptRow:
    response = hide_secrets(row.response)
    tokens = row.tokens if response == row.response else []
    return replace(row, prompt=hide_secrets(row.prompt), response=response, tokens=tokens)


def _groups(rows: Sequence[KeptRow]) -> list[PromptGroup]:
    """Return rows by step and prompt, in the order of their first rows; samples of an evaluation may lie apart."""
    of_prompt: dict[tuple[int, str], list[KeptRow]] = {}
    for row in rows:
        of_prompt.setdefault((row.step, row.prompt_key), []).append(row)
    return [_group(group) for group in of_prompt.values()]


def _group(rows: list[KeptRow]) -> PromptGroup:
    first, judged = rows[0], [row.wrong for row in rows if row.wrong is not None]
    return PromptGroup(
        first.prompt,
        first.prompt_key,
        first.step,
        first.data_source,
        first.ground_truth,
        judged.count(False) if judged else None,
        rows[:RESPONSES_OF_A_GROUP],
        max(0, len(rows) - RESPONSES_OF_A_GROUP),
    )


def _run_rows(
    label: str,
    rows: Sequence[KeptRow],
    problems: list[str],
    filters: Filters,
    edges: Sequence[tuple[str, float, float]],
    groups: list[PromptGroup],
) -> RunRows:
    chosen = [row for row in rows if filters.lets_through(row)]
    rewards = [row.reward for row in chosen if row.reward is not None]
    mean = math.fsum(rewards) / len(rewards) if rewards else None
    return RunRows(label, len(rows), len(chosen), mean, _bars(rows, chosen, edges), groups, problems)


def _edges(rewards: Sequence[float]) -> list[tuple[str, float, float]]:
    """Return (label, from, up to and with) of each bar: one for each value where there are few, else BARS of equal
    width."""
    values = sorted(set(rewards))
    if len(values) <= BARS:
        return [(f"{value:.3g}", value, value) for value in values]
    width = (values[-1] - values[0]) / BARS
    edges = [values[0] + width * index for index in range(BARS)] + [values[-1]]
    # Each begins just above the end of the one before, so that a value at an edge counts once.
    starts = [edges[0], *(math.nextafter(edge, math.inf) for edge in edges[1:-1])]
    return [
        (f"{low:.3g} to {high:.3g}", start, high)
        for start, low, high in zip(starts, edges[:-1], edges[1:], strict=True)
    ]


def _bars(rows: Sequence[KeptRow], chosen: Sequence[KeptRow], edges: Sequence[tuple[str, float, float]]) -> list[Bar]:
    counts = [(label, _count(rows, low, high), _count(chosen, low, high)) for label, low, high in edges]
    highest = max((count for _, count, _ in counts), default=0) or 1
    return [Bar(label, count, of_chosen, count / highest, of_chosen / highest) for label, count, of_chosen in counts]


def _count(rows: Sequence[KeptRow], low: float, high: float) -> int:
    return sum(row.reward is not None and low <= row.reward <= high for row in rows)


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)
