"""The groups that a replica generates: scored and packed as they finish; then all ranks learn their numbers.

Scoring overlaps generation: the responses to a prompt are scored as soon as all of them are there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future

import torch
import torch.distributed as dist

from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.opening import Data
from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows, concatenate, no_rows
from rlhf_megatron.data.row_numbers import SpreadRows
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.generation.agent_turns import AgentTurns
from rlhf_megatron.generation.conversations import Conversations
from rlhf_megatron.generation.judge_verdicts import Judge, JudgeRecord
from rlhf_megatron.generation.prompt_groups import Group, answer_text
from rlhf_megatron.generation.replica import Replica
from rlhf_megatron.recipe import RolloutRecipe
from rlhf_megatron.rewards.score import Pending, Score, ScoreItem, Scorer
from rlhf_megatron.rewards.user_function import LARGEST_SCORE
from rlhf_megatron.roles.reward_model import RewardModel
from rlhf_megatron.rollout.engine import Completion, GenerationRecord
from rlhf_megatron.topology.row_exchange import gather_rows

_MOST_BRANCHES = 2**20  # of a trajectory

OnGroup = Callable[[int, Sequence[Completion]], None]


def make_scorer(recipe: RolloutRecipe, replica: Replica, data: Data) -> Scorer | None:
    """Start the scorer of this replica's responses, on the rank that leads it.

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
        conversations: Conversations | AgentTurns | None = None,
    ) -> None:
        """Set up; ``groups`` as asked for: row ``i * responses + k`` is response k to the prompt of group i.

        ``on_group`` is called with the number and the rows of each group that is whole, on every rank of the replica.
        Where responses have several turns, ``conversations`` knows them: what the model has said is scored, without
        what others have.
        """
        self._conversations = conversations
        self._scorer, self._tokenizer, self._on_group = scorer, tokenizer, on_group
        self._asked, self._responses = groups, responses_per_prompt
        self._rows: dict[int, list[Completion]] = {}
        self._pending: dict[int, Pending] = {}

    def take(self, completion: Completion) -> None:
        """Note one more completion; the last one of its group sends the group to the scorer."""
        index = completion.row_id // self._responses
        self.rows_of(index).append(completion)
        self.submit_if_whole(index)

    def submit_if_whole(self, index: int) -> None:
        """Send a group to the scorer if all of its responses are there."""
        rows = self.rows_of(index)
        if len(rows) < self._responses:
            return
        rows.sort(key=lambda member: member.row_id)
        if self._scorer:
            self._pending[index] = self._scorer.submit([self._item(member) for member in rows])
        if self._on_group:
            self._on_group(index, rows)

    def rows_of(self, index: int) -> list[Completion]:
        """Return the whole responses of a group, those from before included."""
        if index not in self._rows:
            begun = self._asked[index].begun.items()
            self._rows[index] = [of.of_row(index * self._responses + number) for number, of in begun if of.is_whole]
        return self._rows[index]

    def submitted(self) -> list[int]:
        """Return the groups that were sent to the scorer, in rising order."""
        return sorted(self._pending)

    def results(self, groups: Collection[int]) -> dict[int, Score]:
        """Return row id -> score in those of ``groups`` that were sent; waits for the last one.

        Raises RewardError where the run must stop.
        """
        return {
            completion.row_id: _with_turns(score, completion)
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


def _with_turns(score: Score, completion: Completion) -> Score:
    """Return a score with what an environment has given for the turns, as its last part."""
    rows = (*completion.branches, completion)
    if all(row.turn_rewards is None for row in rows):
        return score
    total = sum(sum(row.turn_rewards or ()) for row in rows)
    value = score.value + total
    value, failed = (value, score.failed) if abs(value) <= LARGEST_SCORE else (math.nan, True)
    return dataclasses.replace(score, value=value, parts=(*score.parts, total), failed=failed)


class GroupPacker:
    """Packer of groups in a thread while others are generated: on each rank of a replica the rows that it keeps."""

    def __init__(
        self,
        executor: Executor,
        replica: Replica,
        groups: Sequence[Group],
        choices: ChoiceShape | None = None,
        has_turn_rewards: bool = False,
        has_branches: bool = False,
    ) -> None:
        """Set up; ``groups`` as asked for; with ``choices``, those of experts are packed too, and rewards of turns if
        they have some. ``has_branches``: those of a trajectory are rows of their own."""
        self._executor, self._replica, self._groups, self._choices = executor, replica, groups, choices
        self._has_turn_rewards, self._has_branches = has_turn_rewards, has_branches
        self._packed: dict[int, Future[RolloutBatch]] = {}

    def begin(self, index: int, rows: Sequence[Completion]) -> None:
        """Pack this rank's rows of one group, of which ``rows`` are all."""
        kept = [row for number, row in enumerate(rows) if self._replica.keeps(index, number)]
        self._packed[index] = self._executor.submit(self._pack, self._groups[index].prompt, index, kept)

    def batch(self, groups: Sequence[int]) -> RolloutBatch:
        """Return this rank's rows of those of ``groups`` that were begun here, in their order; without rewards."""
        parts = [self._packed[index].result() for index in groups if index in self._packed]
        return concatenate(parts) if parts else no_rows(self._choices, self._has_turn_rewards)

    def _pack(self, prompt: Prompt, index: int, trajectories: Sequence[Completion]) -> RolloutBatch:
        rows, ids, numbers = list(trajectories), [row.row_id for row in trajectories], None
        if self._has_branches:
            parts = [(each.row_id, k, row) for each in trajectories for k, row in enumerate((*each.branches, each))]
            rows, numbers = [row for _, _, row in parts], [trajectory for trajectory, _, _ in parts]
            ids = [trajectory * _MOST_BRANCHES + k for trajectory, k, _ in parts]
        return batch_from_rows(
            [completion.prompt_token_ids or prompt.token_ids for completion in rows],
            [completion.token_ids for completion in rows],
            [completion.logprobs for completion in rows],
            group_id=[index] * len(rows),
            row_id=ids,
            trajectory_id=numbers,
            weight_version=[completion.weight_version for completion in rows],
            truncated=[completion.finish_reason == "length" for completion in rows],
            sampled=[completion.sampled for completion in rows],
            turn_rewards=[completion.turn_rewards for completion in rows] if self._has_turn_rewards else None,
            expert_choices=[completion.expert_choices for completion in rows],
            choices=self._choices,
        )


class GeneratedGroups:
    """The groups of one call of ``generate``: this replica's responses, and what tells their numbers to all.

    Attributes:
        asked: the groups of all replicas.
        left: groups that were given up, or finished beyond what was wanted; the same on every rank.
        completions: this replica's rows of the other groups, in the order of their ids, on the rank that leads it.
        prompts: of each completion.
        record: of this replica's engine.
        conversations: of responses of several turns, on the ranks of the replica.
        tokens: of all replicas, prompts and responses, once they are gathered.
        judged: of the judge's verdicts on all rows, if there are any.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        chosen: Sequence[int],
        left: Sequence[Group],
        scoring: GroupScoring,
        packer: GroupPacker,
        record: GenerationRecord,
        conversations: Conversations | AgentTurns | None = None,
    ) -> None:
        """Set up; ``chosen``: the numbers of the groups that are not left, of all replicas, rising."""
        self.asked = groups
        self.left, self.record, self.conversations = list(left), record, conversations
        scored = sorted(set(scoring.submitted()).intersection(chosen))
        self.completions = [completion for index in scored for completion in scoring.rows_of(index)]
        self.prompts = [groups[index].prompt for index in scored for _ in scoring.rows_of(index)]
        self._chosen, self._scored, self._scoring, self._packer = chosen, scored, scoring, packer
        self._scores: list[Score] | None = None
        self.tokens = 0
        self.judged: JudgeRecord | None = None

    def scores(self) -> list[Score]:
        """Return the score of each completion; waits for the last one, the first time."""
        if self._scores is None:
            by_row = self._scoring.results(self._scored)
            self._scores = [by_row[completion.row_id] for completion in self.completions]
        return self._scores

    def gather(self, team: dist.ProcessGroup | None = None) -> SpreadRows:
        """Return all replicas' rows in the order of their ids, this rank's with tokens; collective over ``team``."""
        rows = gather_rows(self._packer.batch(self._chosen), team)
        values = {row.row_id: score.value for row, score in zip(self.completions, self.scores(), strict=True)}
        ids = rows.numbers.row_id if rows.numbers.trajectory_id is None else rows.numbers.trajectory_id
        rewards = torch.tensor([values.get(trajectory, 0.0) for trajectory in ids.tolist()])
        dist.all_reduce(rewards, group=team)
        self.tokens = rows.numbers.tokens
        return rows.with_fields(rewards=rewards)

    def with_model_scores(self, rows: SpreadRows, model: RewardModel | Judge, weight: float) -> SpreadRows:
        """Add a model's scores, times ``weight``, to the rewards of the gathered ``rows`` and to ``scores``.

        Collective over the model's team.
        """
        model_scores = model.scores(rows, [self.asked[group].prompt for group in rows.held.group_id.tolist()])
        if isinstance(model, Judge):
            self.judged = model.record
        by_row = dict(zip(rows.numbers.row_id.tolist(), model_scores.tolist(), strict=True))
        self._scores = [
            dataclasses.replace(score, value=score.value + weight * part, parts=(*score.parts, part))
            for score, completion in zip(self.scores(), self.completions, strict=True)
            for part in [float(by_row[completion.row_id])]
        ]
        return rows.with_fields(rewards=rows.numbers.rewards + weight * model_scores)
