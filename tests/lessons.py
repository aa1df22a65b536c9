"""Lessons whose rows are all in one process, for tests of algorithms and of the loop. No test lives here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rlhf_megatron.algorithms.advantage import outcomes, row_advantages, token_advantages
from rlhf_megatron.algorithms.totals import ALONE
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.row_numbers import SpreadRows, numbers_of
from rlhf_megatron.recipe import AlgorithmSection
from rlhf_megatron.roles.learning import Lesson
from rlhf_megatron.roles.shares import Home, Share


def spread_alone(batch: RolloutBatch) -> SpreadRows:
    """Return rows that rank 0 holds, which is the only one."""
    return SpreadRows(numbers_of(batch, 0), batch, 0)


def with_estimates(batch: RolloutBatch, settings: AlgorithmSection) -> RolloutBatch:
    """Return the batch with advantages, and return, by ``settings.advantage``."""
    penalties = None
    if batch.penalties is not None:
        of_rows = batch.penalties.double().split(batch.lengths.tolist())
        penalties = torch.stack([row.sum() for row in of_rows])
    found = row_advantages(outcomes(numbers_of(batch, 0), penalties), settings)
    return token_advantages(batch, settings) if found is None else batch.with_fields(advantages=batch.spread(found))


def lesson_of(batch: RolloutBatch, prompts: int, settings: AlgorithmSection) -> Lesson:
    """Return a lesson of the whole batch, in minibatches of so many prompts."""
    numbers = numbers_of(batch, 0)
    rows = torch.arange(batch.rows)
    share = Share(Home((), (0,), 0), numbers, torch.zeros_like(rows), rows, batch)
    in_reward = settings.kl_placement == "reward" and bool(settings.kl_coef)
    advantages = None if in_reward else row_advantages(outcomes(numbers), settings)
    groups = numbers.group_id
    minibatches = [(groups >= first) & (groups < first + prompts) for first in range(0, numbers.groups, prompts)]
    has_advantage = None if advantages is None else advantages != 0
    return Lesson(numbers, minibatches, advantages, has_advantage, share, share, share, batch)


def placed(role: Any) -> Any:
    """Return ``role`` as one that is on this rank alone."""
    role.totals = ALONE
    return SimpleNamespace(local=role)
