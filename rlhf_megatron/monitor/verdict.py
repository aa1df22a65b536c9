"""The health of a run in one line, made from its files: its last ending, its rules, and how long it has been silent."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from rlhf_megatron.monitor.panels import Series
from rlhf_megatron.monitor.rule_watch import RuleWatch
from rlhf_megatron.recipe.health import HealthSection

# A step may be an evaluation or a checkpoint longer than others; one of many times the usual length is none of these.
USUAL_STEPS_OF_SILENCE, LEAST_SILENCE = 10, 120.0
MOST_FINDINGS = 50
# Rules are followed over the newest steps alone, so that a page of a long run is soon made; windows are far shorter.
MOST_STEPS = 1000


@dataclass(frozen=True)
class Verdict:
    """State of a run, which a person is to know first; ``findings`` are the rules that spoke, the newest first."""

    level: Literal["good", "watch", "bad"]
    text: str
    findings: list[str]
    usual_seconds: float


def verdict_of(series: Series, recipe: Mapping[str, Any], ending: tuple[str, str] | None) -> Verdict:
    """Return the verdict of a run; ``ending`` is what has ended its last attempt and why, None while it goes on."""
    section = _health(recipe)
    watch, findings = RuleWatch(section.all_rules()), []
    for step, metrics in _by_step(series):
        findings += [finding.text() for finding in watch.findings(step, metrics)]
    active = watch.active()
    seconds = [value / 1000 for value in series.get("train/step_time_ms", ([], []))[1] if math.isfinite(value)]
    usual = median(seconds) if seconds else 0.0
    newest = findings[::-1][:MOST_FINDINGS]
    if ending and ending[0] != "done":
        return Verdict("bad", f"{ending[0].replace('_', ' ')}: {ending[1]}", newest, usual)
    if active:
        level: Literal["watch", "bad"] = "watch"
        if any(rule.when == "not_finite" or rule.action == "stop" for rule, _ in active):
            level = "bad"
        names = ", ".join(dict.fromkeys(metric for _, metric in active))
        return Verdict(level, f"look at {names}", newest, usual)
    past = f"; {len(findings)} earlier {'warning' if len(findings) == 1 else 'warnings'} passed" if findings else ""
    return Verdict("good", f"all rules of health hold{past}", newest, usual)


def silence(verdict: Verdict, age: float) -> str:
    """Return the warning of a run that has not ended and has written nothing for ``age`` seconds, or ""."""
    if age <= max(LEAST_SILENCE, USUAL_STEPS_OF_SILENCE * verdict.usual_seconds):
        return ""
    return f"nothing written for {age / 60:,.0f} min; a step takes {verdict.usual_seconds:.3g} s"


def _health(recipe: Mapping[str, Any]) -> HealthSection:
    try:
        return HealthSection.model_validate(recipe.get("health") or {})
    except ValidationError:  # of another version, or damaged: the page names a damaged recipe elsewhere
        return HealthSection()


def _by_step(series: Series) -> Sequence[tuple[int, dict[str, float]]]:
    """Return the metrics of the newest MOST_STEPS steps."""
    first = max((of_name[-1] for of_name, _ in series.values() if of_name), default=0) - MOST_STEPS
    steps: dict[int, dict[str, float]] = {}
    for name, (of_name, values) in series.items():
        begin = bisect.bisect_right(of_name, first)
        for step, value in zip(of_name[begin:], values[begin:], strict=True):
            steps.setdefault(step, {})[name] = value
    return sorted(steps.items())
