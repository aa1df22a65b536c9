"""Scoring that overlaps generation: the responses to a prompt are scored as soon as all of them are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rlhf_megatron.data.prompts import Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rewards.score import Pending, Score, ScoreItem, Scorer
from rlhf_megatron.rollout.engine import Completion


class GroupScoring:
    """The scores of one call of ``generate``: ``take`` each completion as it finishes, then ask for the results.

    Without a scorer, on the ranks that only repeat a replica's work, there are no results.
    """

    def __init__(
        self, scorer: Scorer | None, prompts: Sequence[Prompt], responses_per_prompt: int, tokenizer: Tokenizer
    ) -> None:
        """``prompts`` as asked for, each ``responses_per_prompt`` times: row ``i * responses + k`` answers prompt i."""
        self._scorer, self._prompts, self._tokenizer = scorer, prompts, tokenizer
        self._responses = responses_per_prompt
        self._groups: dict[int, list[Completion]] = defaultdict(list)
        self._pending: dict[int, Pending] = {}

    def take(self, completion: Completion) -> None:
        """Notes one more completion; the last one of its group sends the group to the scorer."""
        index = completion.row_id // self._responses
        group = self._groups[index]
        group.append(completion)
        if self._scorer and len(group) == self._responses:
            group.sort(key=lambda member: member.row_id)
            self._pending[index] = self._scorer.submit([self._item(member) for member in group])

    def results(self) -> dict[int, Score]:
        """Row id -> score; waits for the last one. Raises RewardError where the run must stop."""
        return {
            completion.row_id: score
            for index, pending in self._pending.items()
            for completion, score in zip(self._groups[index], pending.result(), strict=True)
        }

    def _item(self, completion: Completion) -> ScoreItem:
        prompt = self._prompts[completion.row_id // self._responses]
        return ScoreItem(
            prompt.data_source,
            self._tokenizer.decode(completion.token_ids),
            prompt.ground_truth,
            prompt.extra_info,
            completion.row_id,
            len(completion.token_ids),
        )
