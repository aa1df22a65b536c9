"""Health while a run goes on: what becomes of rules that speak, on all ranks, and the watch on memory.

Rules stand in the recipe (recipe/health.py) and are followed by monitor/rule_watch.py; alerts leave through
monitor/alerts.py. What a stop costs, and what comes after a step that was skipped, is decided by the loops.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rlhf_megatron.errors import UserError
from rlhf_megatron.monitor.alerts import AlertSender
from rlhf_megatron.monitor.rule_watch import OWN_METRICS, Finding, RuleWatch
from rlhf_megatron.recipe.health import HealthSection

GB = 2**30
# A rule whose metric has not come by then is reported: its name may be mistyped.
STEPS_UNTIL_A_METRIC_IS_MISSED = 20


class HealthStop(UserError):
    """The end of a run by a rule whose action is stop; raised on all ranks."""


class Health:
    """The health of a run, one on each rank. Making it touches no other rank; ``after`` is collective."""

    def __init__(self, section: HealthSection, run: str, tell: Callable[[str], None]) -> None:
        """Set up; ``run`` names the run in alerts; ``tell`` shows a line on rank 0. Raises MonitorError as AlertSender
        does."""
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._run, self._tell = run, tell
        self._watch = RuleWatch(section.all_rules(), self._rank)
        self._own_rules, self._steps, self._evaluations = {rule.metric for rule in section.rules}, 0, 0
        wanted = section.alert.webhook_environment is not None or section.alert.command
        self._alerts = AlertSender(section.alert, tell) if wanted and self._rank == 0 else None

    def after(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step on all ranks and act; one small collective where no rule speaks.

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
        """Let the last alerts leave."""
        if self._alerts:
            self._alerts.close()

    def _act(self, finding: Finding) -> None:
        """Tell on rank 0, and alert where the rule says so."""
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
        """Tell of rules whose metric should have come by now: one of evaluations with the first of them."""
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
    """Return the findings of all ranks, on each of them; no more than one number is exchanged where there are none."""
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
    """Return memory of this rank now, in GB of 2^30 bytes: ``memory/host_gb``, the process's resident memory, and on a
    GPU ``memory/gpu_gb``, all that is taken of the device (other libraries' and other processes' memory included); and
    ``memory/gpu_retries``, how often since the start torch gave back all that it had kept and asked the driver again.
    """
    metrics = {"memory/host_gb": psutil.Process().memory_info().rss / GB}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        metrics["memory/gpu_gb"] = (total - free) / GB
        metrics["memory/gpu_retries"] = float(torch.cuda.memory_stats()["num_alloc_retries"])
    return metrics
