"""The rules of health over the metrics of steps: which of them speak, and about what. Nobody is alerted here."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from rlhf_megatron.recipe.health import HealthRuleSection

# Each rank watches its own memory; all other metrics are the same on every rank, and rank 0 watches them.
OWN_METRICS = ("memory/host_gb", "memory/gpu_gb", "memory/gpu_retries")


@dataclasses.dataclass(frozen=True)
class WatchState:
    """The memory of one rule for one metric: the last values, and for how many steps its condition has held."""

    values: tuple[float, ...] = ()
    streak: int = 0


def holds(rule: HealthRuleSection, values: Sequence[float]) -> bool:
    """Return whether a rule's condition holds for the last of ``values``: finite, oldest first, at most ``window``.

    The standard deviation is the population's. The slope is that of a least-squares line over the window; each half
    must rise at half the rate at least, so that a single jump does not count as growth.
    """
    assert rule.value is not None, "not_finite is decided before a value is kept"
    if rule.when == "above":
        return values[-1] > rule.value
    if rule.when == "below":
        return values[-1] < rule.value
    if len(values) < rule.window:
        return False
    if rule.when == "moving_std_above":
        return statistics.pstdev(values) > rule.value
    half = len(values) // 2
    return slope(values) > rule.value and min(slope(values[:half]), slope(values[half:])) > rule.value / 2


def slope(values: Sequence[float]) -> float:
    """Return the growth per step of the least-squares line through equally spaced ``values``, at least two of them."""
    return statistics.linear_regression(range(len(values)), values).slope


def observe(rule: HealthRuleSection, state: WatchState, value: float) -> tuple[WatchState, bool]:
    """Return the state after one more value, and whether the rule speaks now: once, when the condition has held long
    enough.

    Values that are not finite concern not_finite alone; other rules pass over them.
    """
    finite = math.isfinite(value)
    if rule.when == "not_finite":
        streak = 0 if finite else state.streak + 1
        return WatchState((), streak), streak == rule.steps
    if not finite:
        return state, False
    values = (*state.values, value)[-rule.window :]
    streak = state.streak + 1 if holds(rule, values) else 0
    return WatchState(values, streak), streak == rule.steps


@dataclasses.dataclass(frozen=True)
class Finding:
    """A rule that speaks: where, when and about what."""

    rule: HealthRuleSection
    rank: int
    step: int
    metric: str
    value: float

    def text(self) -> str:
        """Return one line for a person."""
        rule, limit = self.rule, "" if self.rule.value is None else f"{self.rule.value:g}"
        what = {
            "above": f"above {limit}",
            "below": f"below {limit}",
            "moving_std_above": f"standard deviation over {rule.window} steps above {limit}",
            "slope_above": f"grows by more than {limit} per step over {rule.window} steps",
            "not_finite": "not finite",
        }[rule.when]
        where = f" on rank {self.rank}" if self.metric.startswith(OWN_METRICS) else ""
        lasting = f", for {rule.steps} steps" if rule.steps > 1 else ""
        return f"step {self.step}: {self.metric} = {self.value:.4g}{where}: {what}{lasting}"


class RuleWatch:
    """Follows the rules over the steps of a run, on one rank."""

    def __init__(self, rules: Sequence[HealthRuleSection], rank: int = 0) -> None:
        self._rules, self._rank = rules, rank
        self._states: dict[tuple[int, str], WatchState] = {}
        self._matching: dict[str, list[int]] = {}

    def findings(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Return the rules that speak after a step; of equal metrics under several rules each speaks for itself."""
        findings = []
        matching = ((index, name) for name in metrics for index in self._rules_of(name))
        for index, metric in sorted(matching, key=lambda pair: pair[0]):
            rule, key, value = self._rules[index], (index, metric), float(metrics[metric])
            self._states[key], speaks = observe(rule, self._states.get(key, WatchState()), value)
            if speaks:
                findings.append(Finding(rule, self._rank, step, metric, value))
        return findings

    def _rules_of(self, metric: str) -> list[int]:
        """Return the rules of a metric; matched once, as a page follows the rules over all steps of a run."""
        if metric not in self._matching:
            self._matching[metric] = [
                index for index, rule in enumerate(self._rules) if fnmatchcase(metric, rule.metric)
            ]
        return self._matching[metric]

    def active(self) -> list[tuple[HealthRuleSection, str]]:
        """Return rules whose condition held at the last values of a metric, for long enough, with that metric."""
        return [
            (self._rules[index], metric)
            for (index, metric), state in self._states.items()
            if state.streak >= self._rules[index].steps
        ]

    def unseen(self) -> list[str]:
        """Return metrics of rules that have not come in any step so far."""
        seen = {index for index, _ in self._states}
        return [rule.metric for index, rule in enumerate(self._rules) if index not in seen]
