"""Metrics of generation over all replicas: tokens, requests given up and resumed, and how evenly they worked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_megatron.generation.generated_groups import GeneratedGroups
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.rollout.engine import GenerationRecord
from rlhf_megatron.topology.exchange import sum_over_ranks
from rlhf_megatron.topology.team import Team


def generation_metrics(
    calls: Sequence[GeneratedGroups], replica: Replica, team: Team, has_turns: bool
) -> dict[str, float]:
    """Returns what replicas did in these calls of ``generate``; collective over ``team``.

    ``has_turns``: responses have several. ``rollout/replica_imbalance`` is how long the slowest replica generated, over
    the mean of all, 1 at best.
    """
    records = [each.record if replica.leads else GenerationRecord() for each in calls]
    names: tuple[str, ...] = ("sampled_tokens", "aborted", "resumed")
    own = [float(sum(getattr(record, name) for record in records)) for name in names]
    if has_turns:
        turn_counts = [each.conversations.counts for each in calls if each.conversations and replica.leads]
        names += ("turn_answers", "turn_ends", "turn_failures")
        own += [float(sum(getattr(counts, name) for counts in turn_counts)) for name in ("answers", "ended", "failed")]
    seconds = torch.zeros(len(calls), replica.count, dtype=torch.float64)
    if replica.leads:
        seconds[:, replica.index] = torch.tensor([record.seconds for record in records])
    total = sum_over_ranks([*own, *seconds.flatten().tolist()], team.group)
    metrics = {f"rollout/{name}": value for name, value in zip(names, total, strict=False)}
    seconds = torch.tensor(total[len(names) :]).view_as(seconds)
    mean = float(seconds.mean(1).sum())
    return metrics | {"rollout/replica_imbalance": float(seconds.amax(1).sum()) / mean if mean else 1.0}
