"""The groups that a replica generates: scored and packed as they finish, then brought together with all others.

Scoring overlaps generation: the responses to a prompt are scored as soon as all of them are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future

import torch
import torch.distributed as dist

from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.opening import Data
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows, concatenate
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.generation.conversations import Conversations
from rlhf_megatron.generation.prompt_groups import Group, answer_text
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.recipe import RolloutRecipe
from rlhf_megatron.rewards.score import Pending, Score, ScoreItem, Scorer
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.rollout.engine import Completion, GenerationRecord
from rlhf_megatron.topology.exchange import gather_batches

OnGroup = Callable[[int, Sequence[Completion]], None]


def make_scorer(recipe: RolloutRecipe, replica: Replica, data: Data) -> Scorer | None:
    """Starts the scorer of this replica's responses, on the rank that leads it.

    Raises RewardError where it has no rule for a source of the data.
    """
    if not replica.leads:
        return None
    scorer = Scorer(recipe.reward)
    held_out = (prompt.data_source for prompt in data.validation or [])
    scorer.check_sources(dict.fromkeys([*data.train.data_sources(), *held_out]))
    return scorer


class GroupScoring:
    """The scores of one call of ``generate``: ``take`` each completion as it finishes, then ask for the results.

    Without a scorer, on the ranks that only repeat a replica's work, there are no results.
    """

    def __init__(
        self,
        scorer: Scorer | None,
        groups: Sequence[Group],
        responses_per_prompt: int,
        tokenizer: Tokenizer,
        on_group: OnGroup | None = None,
        conversations: Conversations | None = None,
    ) -> None:
        """``groups`` as asked for: row ``i * responses + k`` is response k to the prompt of group i.

        ``on_group`` is called with the number and the rows of each group that is sent to the scorer. Where responses
        have several turns, ``conversations`` knows them: what the model has said is scored, without what others have.
        """
        self._conversations = conversations
        self._scorer, self._tokenizer, self._on_group = scorer, tokenizer, on_group
        self._asked, self._responses = groups, responses_per_prompt
        self._rows: dict[int, list[Completion]] = {}
        self._pending: dict[int, Pending] = {}

    def take(self, completion: Completion) -> None:
        """Notes one more completion; the last one of its group sends the group to the scorer."""
        index = completion.row_id // self._responses
        self.rows_of(index).append(completion)
        self.submit_if_whole(index)

    def submit_if_whole(self, index: int) -> None:
        """Sends a group to the scorer if all of its responses are there."""
        rows = self.rows_of(index)
        if self._scorer and len(rows) == self._responses:
            rows.sort(key=lambda member: member.row_id)
            self._pending[index] = self._scorer.submit([self._item(member) for member in rows])
            if self._on_group:
                self._on_group(index, rows)

    def rows_of(self, index: int) -> list[Completion]:
        """The whole responses of a group, those from before included."""
        if index not in self._rows:
            begun = self._asked[index].begun.items()
            self._rows[index] = [
                dataclasses.replace(of, row_id=index * self._responses + number) for number, of in begun if of.is_whole
            ]
        return self._rows[index]

    def submitted(self) -> list[int]:
        """The groups that were sent to the scorer, in rising order."""
        return sorted(self._pending)

    def results(self, groups: Collection[int]) -> dict[int, Score]:
        """Row id -> score in those of ``groups`` that were sent; waits for the last one.

        Raises RewardError where the run must stop.
        """
        return {
            completion.row_id: score
            for index, pending in self._pending.items()
            if index in groups
            for completion, score in zip(self._rows[index], pending.result(), strict=True)
        }

    def _item(self, completion: Completion) -> ScoreItem:
        prompt = self._asked[completion.row_id // self._responses].prompt
        turns = {"turns": self._conversations.messages(completion)} if self._conversations else {}
        return ScoreItem(
            prompt.data_source,
            answer_text(completion, self._tokenizer),
            prompt.ground_truth,
            prompt.extra_info | turns,
            completion.row_id,
            completion.sampled_tokens,
        )


class GroupPacker:
    """Packs groups in a thread while others are generated."""

    def __init__(self, executor: Executor, groups: Sequence[Group], choices: ChoiceShape | None = None) -> None:
        """``groups`` as asked for; with ``choices``, those of experts are packed too."""
        self._executor, self._groups, self._choices = executor, groups, choices
        self._packed: dict[int, Future[RolloutBatch]] = {}

    def begin(self, index: int, rows: Sequence[Completion]) -> None:
        """Packs the rows of one group."""
        self._packed[index] = self._executor.submit(_pack, self._groups[index].prompt, index, list(rows), self._choices)

    def batch(self, groups: Sequence[int]) -> RolloutBatch:
        """Returns the rows of ``groups``, of those that were begun here, in their order; without rewards."""
        parts = [self._packed[index].result() for index in groups if index in self._packed]
        return concatenate(parts) if parts else batch_from_rows([], [], [], choices=self._choices)


def _pack(prompt: Prompt, index: int, rows: Sequence[Completion], choices: ChoiceShape | None) -> RolloutBatch:
    return batch_from_rows(
        [prompt.token_ids] * len(rows),
        [completion.token_ids for completion in rows],
        [completion.logprobs for completion in rows],
        group_id=[index] * len(rows),
        row_id=[completion.row_id for completion in rows],
        weight_version=[completion.weight_version for completion in rows],
        truncated=[completion.finish_reason == "length" for completion in rows],
        sampled=[completion.sampled for completion in rows],
        expert_choices=[completion.expert_choices for completion in rows],
        choices=choices,
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

    def gather(self, team: dist.ProcessGroup | None = None) -> RolloutBatch:
        """Returns all replicas' rows on every rank of ``team``, in the order of their ids; collective over it."""
        rewards = torch.tensor([score.value for score in self.scores()], dtype=torch.float32)
        batch = gather_batches(self._packer.batch(self._own).with_fields(rewards=rewards), team)
        self.tokens = len(batch.tokens)
        return batch

    def with_model_scores(self, batch: RolloutBatch, model: RewardModel, weight: float) -> RolloutBatch:
        """Adds a reward model's scores, times ``weight``, to the rewards of the gathered ``batch`` and to ``scores``.

        Collective over the model's team.
        """
        conversations = [self.asked[group].messages for group in batch.group_id.tolist()]
        model_scores = model.scores(batch, conversations)
        by_row = dict(zip(batch.row_id.tolist(), model_scores.tolist(), strict=True))
        self._scores = [
            dataclasses.replace(score, value=score.value + weight * part, parts=(*score.parts, part))
            for score, completion in zip(self.scores(), self.completions, strict=True)
            for part in [float(by_row[completion.row_id])]
        ]
        return batch.with_fields(rewards=batch.rewards + weight * model_scores)
