"""Advantages and returns of tokens from rewards of tokens. Tokens that were not sampled are passed over.

What a tool or an observation puts between the sampled tokens of a row takes no part: a sampled token is followed by the
next sampled one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch, marked_in_rows, turn_ends


def rewards_of_tokens(batch: RolloutBatch) -> Tensor:
    """Return [T] float64: each row's reward on its last sampled token, less the penalty of each token. Parts of it that
    are of single turns lie on the last tokens of these.

    A response without tokens has nothing to put its reward on. One that was cut off ends at its last token like any
    other: what might have followed is not estimated.
    """
    positions = torch.arange(len(batch.tokens))
    last = torch.full((batch.rows,), -1).scatter_reduce(0, batch.row_of_sampled, positions[batch.response_mask], "amax")
    rewards = torch.zeros(len(batch.tokens), dtype=torch.float64)
    at_end = batch.rewards.double()
    if batch.turn_rewards is not None:
        of_turns = batch.turn_rewards.double()
        at_end = at_end - torch.stack([at_end.new_zeros(()), *(row.sum() for row in _in_rows(of_turns, batch))])[1:]
        rewards += of_turns
    rewards[last[last >= 0]] += at_end[last >= 0]
    return rewards if batch.penalties is None else rewards - batch.penalties


def _in_rows(values: Tensor, batch: RolloutBatch) -> Sequence[Tensor]:
    return values.split(batch.lengths.tolist())


def factors(factor: float, batch: RolloutBatch, per: str) -> Tensor:
    """Return [n] of the sampled tokens: what a discount leaves from one to the next, ``per`` token or turn.

    Per turn, all of a turn's tokens are one action, as far as the discount goes: it is applied where a turn ends.
    """
    sampled = batch.response_mask
    if per == "token":
        return torch.full((int(sampled.sum()),), factor, dtype=torch.float64)
    ends = turn_ends(sampled, batch.lengths)[sampled]
    return torch.where(ends, factor, 1.0).double()


def on_last_turns(values: Tensor, batch: RolloutBatch) -> Tensor:
    """Map [T] -> [T]: values of each row's last turn, 0 elsewhere."""
    ends = turn_ends(batch.response_mask, batch.lengths).long()
    # Of each token, how many turns end at it or behind it in its row.
    open_turns = [row.flip(0).cumsum(0).flip(0) for row in _in_rows(ends, batch)]
    return torch.where(torch.cat([ends[:0], *open_turns]) == 1, values, torch.zeros_like(values))


def discounted_sums(values: Tensor, counts: Tensor, factor: float | Tensor) -> Tensor:
    """Map values [n], in rows of ``counts`` [R] -> [n]: s_t = v_t + factor_t * s_(t + 1) within each row."""
    factor = factor if isinstance(factor, Tensor) else torch.full_like(values, factor)
    ends = counts.cumsum(0)
    order = counts.argsort(descending=True, stable=True)
    ends, counts = ends[order], counts[order]
    sums, running = values.clone(), values.new_zeros(len(counts))
    for back in range(int(counts[0]) if len(counts) else 0):
        rows = int((counts > back).sum())  # those that are this long come first
        positions = ends[:rows] - 1 - back
        running[:rows] = values[positions] + factor[positions] * running[:rows]
        sums[positions] = running[:rows]
    return sums


def gae(
    rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float | Tensor = 1.0,
    gae_lambda: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor]:
    """Map rewards [T], values [T] (before the token was sampled), both of packed rows -> (advantages [T], returns [T]).

    Generalised advantage estimation (arXiv 1506.02438, eq. 16) over the sampled tokens of each row:
    delta_t = r_t + gamma V_(t + 1) - V_t, A_t = delta_t + gamma lambda A_(t + 1), return_t = A_t + V_t. The value after
    the last token is 0, also where the response was cut off. Both are 0 on tokens that were not sampled.
    gamma and lambda may be [n], of the sampled tokens.
    """
    sampled, counts = values[response_mask], marked_in_rows(response_mask, cu_seqlens)
    following = torch.cat([sampled[1:], sampled.new_zeros(1)])[: len(sampled)]
    following[counts.cumsum(0)[counts > 0] - 1] = 0.0
    errors = rewards[response_mask] + gamma * following - sampled
    advantages = torch.zeros_like(values)
    advantages[response_mask] = discounted_sums(errors, counts, gamma * gae_lambda)
    return advantages, (advantages + values) * response_mask
