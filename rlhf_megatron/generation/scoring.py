"""Scoring that overlaps generation: the responses to a prompt are scored as soon as all of them are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.generation.conversations import Conversations, answer_text
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.rewards.score import Pending, Score, ScoreItem, Scorer
from rlhf_megatron.rollout.engine import Completion

OnGroup = Callable[[int, Sequence[Completion]], None]


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
