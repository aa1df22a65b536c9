"""Roles asked about batches of which every rank has all: each data-parallel rank does its share, all get all outputs.

Import it as ``from parallel.whole_batches import ...``. No test lives here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.roles.outputs import Objective, TokenOutputs
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.roles.role import Role


def logprobs(role: Role | PlacedRole, batch: RolloutBatch, method: str = "logprobs") -> TokenOutputs:
    """Return ``Role.logprobs``, or ``base_logprobs``, of all rows on every rank."""
    local = role.local if isinstance(role, PlacedRole) else role
    outputs = torch.zeros(2, len(batch.tokens))
    if local:
        rows = local.own_rows(batch.lengths)
        own = getattr(local, method)(batch.select(rows))
        outputs = _on_all_tokens(local, batch, rows, torch.stack([own.logprobs, own.entropy]))
    return TokenOutputs(*(role.broadcast(outputs) if isinstance(role, PlacedRole) else outputs))


def values(role: Role, batch: RolloutBatch) -> Tensor:
    """Return ``Role.values`` of all rows on every rank."""
    rows = role.own_rows(batch.lengths)
    return _on_all_tokens(role, batch, rows, role.values(batch.select(rows))[None])[0]


def scores(role: Role | PlacedRole, batch: RolloutBatch) -> Tensor:
    """Return ``Role.scores`` of all rows on every rank."""
    local = role.local if isinstance(role, PlacedRole) else role
    found = torch.zeros(batch.rows)
    if local:
        rows = local.own_rows(batch.lengths)
        found[rows] = local.scores(batch.select(rows))
        found = local.totals.sum(found)
    return role.broadcast(found) if isinstance(role, PlacedRole) else found


def update(
    role: Role | PlacedRole,
    batch: RolloutBatch,
    fields: dict[str, Tensor],
    objective: Objective,
    rows_together: int = 1,
    **how: Any,
) -> dict[str, float]:
    """Do ``Role.update`` on all rows; ``fields`` are [T] each, or [R]."""
    local = role.local if isinstance(role, PlacedRole) else role
    if local is None:
        return {}
    rows = local.own_rows(batch.lengths, rows_together)
    chosen = _tokens_of(batch, rows)
    own = {name: each[rows if len(each) == batch.rows else chosen] for name, each in fields.items()}
    return local.update(batch.select(rows), own, objective, rows_together=rows_together, **how)


def _on_all_tokens(role: Role, batch: RolloutBatch, rows: list[int], outputs: Tensor) -> Tensor:
    whole = torch.zeros(len(outputs), len(batch.tokens))
    whole[:, _tokens_of(batch, rows)] = outputs
    return role.totals.sum(whole)


def _tokens_of(batch: RolloutBatch, rows: list[int]) -> Tensor:
    places = torch.arange(len(batch.tokens)).split(batch.lengths.tolist())
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(places[row] for row in rows)])
