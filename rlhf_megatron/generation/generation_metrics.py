"""Metrics of generation and scoring over all replicas: tokens, aborted and resumed requests, imbalance, rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_megatron.generation.agent_turns import AgentCounts
from rlhf_megatron.generation.conversations import TurnCounts
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.generation.tool_turns import ToolCounts, ToolTurns
from rlhf_megatron.rewards.score import Score, reward_metrics, reward_totals
from rlhf_megatron.rollout.engine import Completion, GenerationRecord
from rlhf_megatron.topology.exchange import sum_over_ranks
from rlhf_megatron.topology.team import Team

TOKEN_VERSION = "rollout/token_weight_version"
"""Mean over the tokens of the rows that are given."""

_OF_TURNS = {
    "answers": "turn_answers",
    "ended": "turn_ends",
    "failed": "turn_failures",
    "cut": "turn_answers_truncated",
    "branches": "turn_branches",
    "calls": "turn_calls",
    "seconds": "turn_seconds",
    "replayed": "trajectories_replayed",
    "resumed": "trajectories_resumed",
    "restarted": "trajectories_restarted",
}
"""Metric of each of TurnCounts."""

_OF_TOOLS = ("calls", "failed", "seconds", "truncated")


def generation_metrics(
    records: Sequence[GenerationRecord],
    completions: Sequence[Completion],
    turns: Sequence[TurnCounts] | None,
    replica: Replica,
    team: Team,
) -> dict[str, float]:
    """Return what replicas did in some calls of ``generate``; collective over ``team``.

    ``records`` has one of each call, ``completions`` all that this replica gives of them; ``turns`` those of responses
    of several turns, None where there are no such responses. Only what the leading rank of a replica gives counts.
    ``rollout/replica_imbalance`` is how long the slowest replica generated, over the mean of all, 1 at best.
    """
    names: tuple[str, ...] = (
        *("sampled_tokens", "aborted", "paused", "resumed"),
        *("in_flight_mean", "given_tokens", "versions", "verifications", "drafted_tokens", "accepted_tokens"),
    )
    own = [float(sum(getattr(record, name) for record in records)) for name in names[:4]]
    steps = sum(record.steps for record in records)
    own.append(sum(record.in_flight * record.steps for record in records) / max(steps, 1))
    versions = [completion.weight_versions for completion in completions]
    own += [float(sum(map(len, versions))), float(sum(map(sum, versions)))]
    own += [float(sum(getattr(record, name) for record in records)) for name in names[7:10]]
    if turns is not None:
        names += tuple(_OF_TURNS.values())
        own += [float(sum(getattr(counts, name) for counts in turns)) for name in _OF_TURNS]
    seconds = torch.zeros(len(records) + 1, replica.count, dtype=torch.float64)  # and of the slowest answer
    if replica.leads:
        slowest = max((counts.slowest for counts in turns or ()), default=0.0)
        seconds[:, replica.index] = torch.tensor([*(record.seconds for record in records), slowest]).double()
    else:
        own = [0.0] * len(own)
    total = sum_over_ranks([*own, *seconds.flatten().tolist()], team.group)
    metrics = {f"rollout/{name}": value for name, value in zip(names, total, strict=False)}
    given, of_versions = metrics.pop("rollout/given_tokens"), metrics.pop("rollout/versions")
    metrics |= _speculation(metrics)
    if given:
        metrics[TOKEN_VERSION] = of_versions / given
    seconds = torch.tensor(total[len(names) :]).view_as(seconds)
    if turns is not None:
        metrics |= _latency(metrics, float(seconds[-1].max()))
    seconds = seconds[:-1]
    mean = float(seconds.mean(1).sum())
    return metrics | {"rollout/replica_imbalance": float(seconds.amax(1).sum()) / mean if mean else 1.0}


def turn_time_metrics(records: Sequence[GenerationRecord], replica: Replica, team: Team) -> dict[str, float]:
    """Return where the time of some calls of ``generate`` with environments or agents went; collective over ``team``.

    Seconds of the engine's steps, and of its waiting for answers with nothing else to do, are means over the replicas;
    ``rollout/waiting_mean`` is how many rows of all replicas waited for answers in that time.
    """
    names = ("engine_seconds", "idle_seconds", "waiting_seconds", "prompt_tokens", "prefilled_tokens")
    own = [float(sum(getattr(record, name) for record in records)) if replica.leads else 0.0 for name in names]
    engine, idle, waiting, prompts, prefilled = sum_over_ranks(own, team.group)
    return {
        "rollout/engine_seconds": engine / replica.count,
        "rollout/idle_seconds": idle / replica.count,
        "rollout/waiting_mean": waiting / max(engine + idle, 1e-9) * replica.count,
        "rollout/prefix_cache_hit_rate": 1 - prefilled / prompts if prompts else 0.0,
    }


def agent_metrics(counts: Sequence[AgentCounts], replica: Replica, team: Team) -> dict[str, float]:
    """Return what programs have asked of all replicas, and how they ended; collective over ``team``."""
    names = {
        "requests": "agent_requests",
        "branches": "agent_branches",
        "refused": "agent_refusals",
        "ended": "agent_ends",
        "failed": "agent_failures",
        "recalled": "agent_answers_replayed",
        "diverged": "agent_divergences",
    } | {name: f"trajectories_{name}" for name in ("replayed", "resumed", "restarted")}
    own = [float(sum(getattr(each, name) for each in counts)) if replica.leads else 0.0 for name in names]
    total = sum_over_ranks(own, team.group)
    return {f"rollout/{name}": value for name, value in zip(names.values(), total, strict=True)}


def tool_metrics(turns: Sequence[ToolTurns], names: Sequence[str], replica: Replica, team: Team) -> dict[str, float]:
    """Return what the model has called on all replicas, of the tools of these ``names``; collective over ``team``.

    ``tools/NAME/latency_ms_mean`` is the mean time of a call, 0 without any.
    """
    own = [float(sum(each.malformed for each in turns))]
    for name in names:
        counts = [each.counts.get(name, ToolCounts()) for each in turns]
        own += [float(sum(getattr(each, field) for each in counts)) for field in _OF_TOOLS]
    total = sum_over_ranks(own if replica.leads else [0.0] * len(own), team.group)
    metrics = {"tools/malformed": total[0]}
    for position, name in enumerate(names):
        calls, failed, seconds, truncated = total[1 + position * len(_OF_TOOLS) :][: len(_OF_TOOLS)]
        latency = 1000 * seconds / calls if calls else 0.0
        values = {"calls": calls, "failed": failed, "latency_ms_mean": latency, "truncated": truncated}
        metrics |= {f"tools/{name}/{key}": value for key, value in values.items()}
    return metrics


def _latency(metrics: dict[str, float], slowest: float) -> dict[str, float]:
    """Take the seconds of all answers out of ``metrics`` and return the milliseconds of one, and of the slowest."""
    seconds, calls = metrics.pop("rollout/turn_seconds"), metrics["rollout/turn_calls"]
    mean = seconds / calls if calls else 0.0
    return {"rollout/turn_latency_ms_mean": 1000 * mean, "rollout/turn_latency_ms_max": 1000 * slowest}


def _speculation(metrics: dict[str, float]) -> dict[str, float]:
    """Take counts of drafts out of ``metrics`` and return those that say something, without drafts none.

    ``rollout/speculation_acceptance_length``: tokens of a step and drafted sequence, 1 where no draft is ever right.
    """
    names = ("rollout/verifications", "rollout/drafted_tokens", "rollout/accepted_tokens")
    verifications, drafted, accepted = (metrics.pop(name) for name in names)
    if not verifications:
        return {}
    length = 1 + accepted / verifications
    return {names[1]: drafted, names[2]: accepted, "rollout/speculation_acceptance_length": length}


def scoring_metrics(scores: Sequence[Score], names: Sequence[str], team: Team) -> dict[str, float]:
    """Return the scoring outcomes of this rank's ``scores``, and the mean of each part of the reward.

    ``names``: of the parts. Collective over ``team``.
    """
    totals = reward_totals(scores, names)
    return reward_metrics(dict(zip(totals, sum_over_ranks(list(totals.values()), team.group), strict=True)))
