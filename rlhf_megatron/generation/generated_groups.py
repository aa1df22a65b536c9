"""The groups that a replica has generated: packed as they finish, and brought together with those of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows, concatenate
from rlhf_megatron.generation.conversations import Conversations
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.generation.scoring import GroupScoring
from rlhf_megatron.rewards.score import Score
from rlhf_megatron.rollout.engine import Completion, GenerationRecord
from rlhf_megatron.topology.exchange import gather_batches


class GroupPacker:
    """Packs groups in a thread while others are generated."""

    def __init__(self, executor: Executor, groups: Sequence[Group]) -> None:
        """``groups`` as asked for."""
        self._executor, self._groups = executor, groups
        self._packed: dict[int, Future[RolloutBatch]] = {}

    def begin(self, index: int, rows: Sequence[Completion]) -> None:
        """Packs the rows of one group."""
        self._packed[index] = self._executor.submit(_pack, self._groups[index].prompt, index, list(rows))

    def batch(self, groups: Sequence[int]) -> RolloutBatch:
        """Returns the rows of ``groups``, of those that were begun here, in their order; without rewards."""
        parts = [self._packed[index].result() for index in groups if index in self._packed]
        return concatenate(parts) if parts else batch_from_rows([], [], [])


def _pack(prompt: Prompt, index: int, rows: Sequence[Completion]) -> RolloutBatch:
    return batch_from_rows(
        [prompt.token_ids] * len(rows),
        [completion.token_ids for completion in rows],
        [completion.logprobs for completion in rows],
        group_id=[index] * len(rows),
        row_id=[completion.row_id for completion in rows],
        weight_version=[completion.weight_version for completion in rows],
        truncated=[completion.finish_reason == "length" for completion in rows],
        sampled=[completion.sampled for completion in rows],
    )


class GeneratedGroups:
    """The groups of one call of ``generate``: this replica's responses, and what brings all replicas' together.

    Attributes:
        asked: the prompts of all replicas.
        left: groups that were given up, or finished beyond what was wanted; the same on every rank.
        completions: this replica's rows of the other groups, in the order of their ids, on the rank that leads it.
        prompts: of each completion.
        record: of this replica's engine.
        conversations: of responses of several turns, on the ranks of the replica.
        tokens: of all replicas, prompts and responses, once they are gathered.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        chosen: Sequence[int],
        left: Sequence[Group],
        scoring: GroupScoring,
        packer: GroupPacker,
        record: GenerationRecord,
        conversations: Conversations | None = None,
    ) -> None:
        """``chosen``: the numbers of the groups that are not left, of all replicas, rising."""
        self.asked = [group.prompt for group in groups]
        self.left, self.record, self.conversations = list(left), record, conversations
        own = sorted(set(scoring.submitted()).intersection(chosen))
        self.completions = [completion for index in own for completion in scoring.rows_of(index)]
        self.prompts = [self.asked[index] for index in own for _ in scoring.rows_of(index)]
        self._own, self._scoring, self._packer = own, scoring, packer
        self._scores: list[Score] | None = None
        self.tokens = 0

    def scores(self) -> list[Score]:
        """Returns the score of each completion; waits for the last one, the first time."""
        if self._scores is None:
            by_row = self._scoring.results(self._own)
            self._scores = [by_row[completion.row_id] for completion in self.completions]
        return self._scores

    def add_reward_part(self, values: Tensor, row_id: Tensor, weight: float) -> None:
        """Counts one more part of the reward, [R] over the rows of all replicas, whose ids are ``row_id`` [R]."""
        parts = dict(zip(row_id.tolist(), values.tolist(), strict=True))
        self._scores = [
            dataclasses.replace(score, value=score.value + weight * part, parts=(*score.parts, part))
            for score, completion in zip(self.scores(), self.completions, strict=True)
            for part in [float(parts[completion.row_id])]
        ]

    def gather(self, team: dist.ProcessGroup | None = None) -> RolloutBatch:
        """Returns all replicas' rows on every rank of ``team``, in the order of their ids; collective over it."""
        rewards = torch.tensor([score.value for score in self.scores()], dtype=torch.float32)
        batch = gather_batches(self._packer.batch(self._own).with_fields(rewards=rewards), team)
        self.tokens = len(batch.tokens)
        return batch
