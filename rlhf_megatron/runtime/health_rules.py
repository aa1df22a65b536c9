"""Health while a run goes on: rules over the metrics of each step, and the watch on memory.

Rules stand in the recipe (recipe/health.py), alerts leave through monitor/alerts.py. What a stop costs, and what comes
after a step that was skipped, is decided by the loops.
"""

from __future__ import annotations

import dataclasses
import math
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rlhf_megatron.errors import UserError
from rlhf_megatron.monitor.alerts import AlertSender
from rlhf_megatron.recipe.health import HealthRuleSection, HealthSection

GB = 2**30
# Each rank watches its own memory; all other metrics are the same on every rank, and rank 0 watches them.
OWN_METRICS = ("memory/host_gb", "memory/gpu_gb")
# A rule whose metric has not come by then is told: its name may be mistyped.
STEPS_UNTIL_A_METRIC_IS_MISSED = 20


class HealthStop(UserError):
    """The end of a run by a rule whose action is stop; raised on all ranks."""


# ---- rules


@dataclasses.dataclass(frozen=True)
class WatchState:
    """The memory of one rule for one metric: the last values, and for how many steps its condition has held."""

    values: tuple[float, ...] = ()
    streak: int = 0


def holds(rule: HealthRuleSection, values: Sequence[float]) -> bool:
    """Returns whether a rule's condition holds for the last of ``values``: finite, oldest first, at most ``window``.

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
    """Growth per step of the least-squares line through equally spaced ``values``, at least two of them."""
    return statistics.linear_regression(range(len(values)), values).slope


def observe(rule: HealthRuleSection, state: WatchState, value: float) -> tuple[WatchState, bool]:
    """The state after one more value, and whether the rule speaks now: once, when the condition has held long enough.

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
        """One line for a person."""
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

    def findings(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """The rules that speak after a step; of equal metrics under several rules each speaks for itself."""
        findings = []
        for index, rule in enumerate(self._rules):
            for metric in (name for name in metrics if fnmatchcase(name, rule.metric)):
                key, value = (index, metric), float(metrics[metric])
                self._states[key], speaks = observe(rule, self._states.get(key, WatchState()), value)
                if speaks:
                    findings.append(Finding(rule, self._rank, step, metric, value))
        return findings

    def unseen(self) -> list[str]:
        """Metrics of rules that have not come in any step so far."""
        seen = {index for index, _ in self._states}
        return [rule.metric for index, rule in enumerate(self._rules) if index not in seen]


class Health:
    """The health of a run, one on each rank. Making it touches no other rank; ``after`` is collective."""

    def __init__(self, section: HealthSection, run: str, tell: Callable[[str], None]) -> None:
        """``run`` names the run in alerts; ``tell`` shows a line on rank 0. Raises MonitorError as AlertSender does."""
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._run, self._tell = run, tell
        self._watch = RuleWatch(section.all_rules(), self._rank)
        self._own_rules, self._steps, self._evaluations = {rule.metric for rule in section.rules}, 0, 0
        wanted = section.alert.webhook_environment is not None or section.alert.command
        self._alerts = AlertSender(section.alert, tell) if wanted and self._rank == 0 else None

    def after(self, step: int, metrics: Mapping[str, float]) -> None:
        """Looks at the metrics of a step on all ranks and acts; one small collective where no rule speaks.

        Raises HealthStop on all ranks where a rule says stop, after its alert has left or half a minute has passed.
        """
        own = metrics if self._rank == 0 else {name: metrics[name] for name in metrics if name.startswith(OWN_METRICS)}
        findings = _from_all_ranks(self._watch.findings(step, own))
        self._miss_metrics(any(name.startswith("eval/") for name in metrics))
        for finding in findings:
            self._act(finding)
        ends = [finding for finding in findings if finding.rule.action == "stop"]
        if ends:
            self.close()
            raise HealthStop(f"health.rules stopped the run: {ends[0].text()}")

    def close(self) -> None:
        """Lets the last alerts leave."""
        if self._alerts:
            self._alerts.close()

    def _act(self, finding: Finding) -> None:
        """Rank 0 tells, and alerts where the rule says so."""
        if self._rank:
            return
        self._tell(f"health: {finding.text()}")
        if self._alerts and finding.rule.action != "log":
            details = {
                "run": self._run,
                "host": socket.gethostname(),
                "step": finding.step,
                "rank": finding.rank,
                "metric": finding.metric,
                # JSON has no nan.
                "value": finding.value if math.isfinite(finding.value) else str(finding.value),
                "rule": finding.rule.model_dump(mode="json"),
            }
            stops = finding.rule.action == "stop"
            self._alerts.send(f"{self._run}: {finding.text()}{'; the run stops' * stops}", details, urgent=stops)

    def _miss_metrics(self, evaluated: bool) -> None:
        """Tells of rules whose metric should have come by now: one of evaluations with the first of them."""
        if evaluated:
            self._evaluations += 1
        else:
            self._steps += 1
        if self._rank or (self._evaluations != 1 if evaluated else self._steps != STEPS_UNTIL_A_METRIC_IS_MISSED):
            return
        when = "the first evaluation" if evaluated else f"{self._steps} steps"
        for metric in sorted(self._own_rules.intersection(self._watch.unseen())):
            if metric.startswith("eval/") == evaluated:
                self._tell(f"warning: health.rules: no metric {metric} in {when}; see docs/monitoring.md")


def _from_all_ranks(findings: list[Finding]) -> list[Finding]:
    """The findings of all ranks, on each of them; no more than one number is exchanged where there are none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return findings
    most = torch.tensor([len(findings)])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if not most:
        return []
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, findings)
    return [finding for of_rank in gathered for finding in of_rank]


def memory_metrics() -> dict[str, float]:
    """Memory of this rank now, in GB of 2^30 bytes: ``memory/host_gb``, the process's resident memory, and on a GPU
    ``memory/gpu_gb``, all that is taken of the device (other libraries' and other processes' memory included)."""
    metrics = {"memory/host_gb": psutil.Process().memory_info().rss / GB}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        metrics["memory/gpu_gb"] = (total - free) / GB
    return metrics
