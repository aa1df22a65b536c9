"""A reward model as the loops see it: scores of rollouts, in its own layout and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.tokenizer import Message, Tokenizer
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.topology.exchange import gather_batches


class RewardModel:
    """A frozen role with a scalar head, and its tokenizer.

    It reads conversations in its own chat template, as it was trained on and as its model card shows, never the
    policy's tokens: these may be of another vocabulary, of another template, or end where no template ends.
    """

    def __init__(
        self,
        role: PlacedRole,
        tokenizer: Tokenizer,
        policy_tokenizer: Tokenizer,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """``tokenizer`` is the reward model's, ``policy_tokenizer`` the one that the rollouts are in, ``group`` that of
        the role's team."""
        self._role, self._tokenizer, self._policy_tokenizer, self._group = role, tokenizer, policy_tokenizer, group

    def scores(self, batch: RolloutBatch, conversations: Sequence[Sequence[Message]]) -> Tensor:
        """[R] float32, the score of each rollout, on the CPU of every rank of the role's team; collective over it.

        ``conversations`` [R] are the messages that each row answers. The row's sampled tokens are decoded without
        control tokens to the assistant's turn behind them, and the whole is rendered and encoded anew; each rank does
        so for a share of the rows. A response that was cut off looks to the model as if it ended there.
        """
        rows = range(dist.get_rank(self._group), batch.rows, dist.get_world_size(self._group))
        share = batch.select(rows)
        lengths = share.response_lengths.tolist()
        sampled = share.tokens[share.response_mask].split(lengths)
        answers = [self._policy_tokenizer.decode(tokens.tolist()) for tokens in sampled]
        encoded = self._tokenizer.encode_answered([conversations[row] for row in rows], answers)
        own = batch_from_rows(encoded, [()] * len(encoded), row_id=list(rows))
        return self._role.scores(gather_batches(own, self._group))
