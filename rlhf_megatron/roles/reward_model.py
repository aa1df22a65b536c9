"""A reward model as the loops see it: scores of rollouts, in its own layout and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import SpreadRows
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.roles.placed import PlacedRole
from rlhf_megatron.roles.shares import share_out
from rlhf_megatron.topology.row_exchange import gather_rows


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
        """Set up; ``tokenizer`` is the reward model's, ``policy_tokenizer`` the one that the rollouts are in, ``group``
        that of the role's team."""
        self._role, self._tokenizer, self._policy_tokenizer, self._group = role, tokenizer, policy_tokenizer, group

    def scores(self, rows: SpreadRows, prompts: Sequence[Prompt]) -> Tensor:
        """Return [R] float32, the score of each rollout, on the CPU of every rank of the role's team; collective over
        it.

        ``prompts`` are what the rows answer which this rank holds. A row's sampled tokens are decoded to the
        assistant's turn behind the prompt's messages, and the whole is rendered and encoded anew.
        A response that was cut off looks to the model as if it ended there.
        """
        conversations = [prompt.messages for prompt in prompts]
        encoded = self._tokenizer.encode_answered(conversations, sampled_texts(rows.held, self._policy_tokenizer))
        places = (rows.numbers.holder == rows.rank).nonzero().squeeze(1)
        read = gather_rows(batch_from_rows(encoded, [()] * len(encoded), row_id=places.tolist()), self._group)
        home = self._role.home
        [share] = share_out(read, [(home, self._role.assign(read.numbers))])
        scores = torch.zeros(read.rows)
        if self._role.local:
            own = self._role.local.scores(share.batch)
            if home.leads(rows.rank):
                scores[share.rows] = own
        dist.all_reduce(scores, group=self._group)
        return scores


def sampled_texts(batch: RolloutBatch, tokenizer: Tokenizer) -> list[str]:
    """Return the text of each row's sampled tokens, of which ``tokenizer`` made it, without control tokens."""
    sampled = batch.tokens[batch.response_mask].split(batch.response_lengths.tolist())
    return [tokenizer.decode(tokens.tolist()) for tokens in sampled]
