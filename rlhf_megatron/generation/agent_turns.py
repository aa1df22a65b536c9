"""Rows whose turns a user's agent asks for (agents/): its requests become turns of the engine's."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from rlhf_megatron.agents.message_parsing import AnswerReader
from rlhf_megatron.agents.program import AgentProgram, Play
from rlhf_megatron.agents.trajectory import AgentTrajectory, Asked, Ended, Event, Limits, last_turn_begin
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.generation.journal import JournaledCall, digest_of_tokens, is_failed
from rlhf_megatron.generation.prompt_groups import Group
from rlhf_megatron.recipe import RolloutRecipe
from rlhf_megatron.rollout.engine import Completion, EnvironmentReply, SampledTurn


@dataclasses.dataclass
class AgentCounts:
    """Outcomes of one replica's programs.

    Attributes:
        requests: answered, of them ``recalled`` as in the run that was killed.
        branches: begun beyond a trajectory's first.
        refused, ended, failed: trajectories that asked for too much, that ended well, that failed and are left out.
        diverged: trajectories that did not ask again for all that they had been answered.
        replayed, resumed, restarted: trajectories that a killed run had begun; see JournaledCall.
    """

    requests: int = 0
    branches: int = 0
    refused: int = 0
    ended: int = 0
    failed: int = 0
    recalled: int = 0
    diverged: int = 0
    replayed: int = 0
    resumed: int = 0
    restarted: int = 0


class AgentTurns:
    """The trajectories of one generation of a replica; ``rollout.engine.Environment``. A context manager, at whose end
    no program is left running."""

    opens = True

    def __init__(
        self,
        recipe: RolloutRecipe,
        program: AgentProgram | None,
        groups: Sequence[Group],
        responses_per_prompt: int,
        tokenizer: Tokenizer,
        seed_of: Callable[[int], int],
        journal: JournaledCall | None = None,
    ) -> None:
        """Set up; row ``i * responses + k`` is response k to the prompt of group i. ``program`` is on the rank that
        leads. ``seed_of``: a row's; a program gets that of the group's first, so that all of a group begin alike.
        ``journal``: has the answers that were given already, and gets others before a program does.

        Raises RolloutError where the chat template does not say where a turn of the model's ends, or vLLM has not the
        parsers of the recipe.
        """
        section = recipe.rollout.agent
        assert section is not None
        self._program, self._tokenizer, self._groups = program, tokenizer, groups
        self._responses, self._seed_of, self.repeatable = responses_per_prompt, seed_of, recipe.rollout_repeats
        end = tokenizer.turn_end_token()
        if end is None:
            raise RolloutError(
                "rollout.agent: the chat template puts no control token after an assistant's turn; give one that does, "
                "by data.chat_template"
            )
        self._end_token = end
        self._reader = AnswerReader(section, tokenizer) if program else None
        most = recipe.rollout.max_response_length
        self._limits = Limits(recipe.data.max_prompt_length + most, most, section.max_turns)
        self._plays: dict[int, Play] = {}  # by row, of those that have begun and not ended
        self._messages: dict[int, list[dict[str, Any]]] = {}  # by row: the conversation, of those that have ended
        self.counts = AgentCounts()
        self._journal, self._digests = journal, dict[int, str]()  # by row: of what was asked and is not answered yet
        self._recorded = {row_id: list(row.recorded) for row_id, row in journal.rows.items()} if journal else {}
        if journal:
            self.counts.replayed, self.counts.resumed = journal.replayed, journal.resumed
            self.counts.restarted = journal.restarted
        for row_id, row in journal.rows.items() if journal else ():
            self._messages[row_id] = row.messages or []

    def goes_on(self, completion: Completion) -> bool:
        """See Environment."""
        return True

    def ask(self, completion: Completion) -> Future[Event]:
        """See Environment."""
        row_id = completion.row_id
        if row_id not in self._plays:
            assert self._program is not None and self._reader is not None, "only the rank that leads asks"
            seed = self._seed_of(row_id)
            trajectory = AgentTrajectory(self._tokenizer, self._reader, self._end_token, self._limits, seed)
            attempt = self._journal.begin(row_id) if self._journal else 1
            self._plays[row_id] = self._program.begin(self._row(row_id) | {"attempt": attempt}, trajectory)
        elif self._journal and row_id in self._digests:
            self._journal.keep_turn(row_id, self._digests.pop(row_id), last_turn(completion))
        return self._plays[row_id].next_event(completion)

    def _row(self, row_id: int) -> dict[str, Any]:
        group = row_id // self._responses
        return self._groups[group].row(self._seed_of(group * self._responses))

    def read(self, completion: Completion, event: Event) -> EnvironmentReply:
        """See Environment. Raises RolloutError where the program does not work."""
        if isinstance(event, Ended):
            return self._ended(completion, event)
        self.counts.requests += 1
        self.counts.branches += event.branches
        recorded = self._recall(completion, event) if self._journal else None
        return EnvironmentReply(event.token_ids, None, event.branches, event.max_tokens, event.kept, recorded)

    def _recall(self, completion: Completion, asked: Asked) -> SampledTurn | None:
        """Take the answer that a killed run has given to the same prompt; None where none is left."""
        row_id, before = completion.row_id, completion.cut(asked.kept) if asked.kept is not None else completion
        begins = asked.branches or not completion.token_ids
        prompt = [] if begins else [*(before.prompt_token_ids or ()), *before.token_ids]
        digest = digest_of_tokens([*prompt, *asked.token_ids], asked.max_tokens)
        recorded = self._recorded.get(row_id, [])
        index = next((index for index, (of, _) in enumerate(recorded) if of == digest), None)
        if index is None:
            self._digests[row_id] = digest
            return None
        self.counts.recalled += 1
        return recorded.pop(index)[1]

    def _ended(self, completion: Completion, ended: Ended) -> EnvironmentReply:
        assert self._program is not None, "only the rank that leads asks"
        play = self._plays.pop(completion.row_id)
        play.close()
        self._messages[completion.row_id] = play.trajectory.messages
        self.counts.refused += ended.refused
        self.counts.diverged += bool(self._recorded.pop(completion.row_id, None))
        reward = self._program.reward_of(ended)
        if not isinstance(reward, str) and not completion.token_ids:
            reward = "it asked the model for nothing"
        if not isinstance(reward, str):
            self.counts.ended += 1
            return EnvironmentReply(None, reward, kept=ended.kept)
        self.counts.failed += 1
        if self.counts.failed == 1:  # of this generation; the others are in rollout/agent_failures
            why = f"warning: {self._program.key}: a trajectory failed and is left out: {reward}"
            print(why, file=sys.stderr, flush=True)
        return EnvironmentReply(None, math.nan, kept=ended.kept)

    def end(self, completion: Completion) -> None:
        """Note that a row is whole; one whose program failed gets another chance in a run that resumes."""
        if self._journal and self._program and not is_failed(completion):
            self._journal.keep_branches(completion, self.messages(completion))

    def __enter__(self) -> AgentTurns:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for play in self._plays.values():
            play.close()
        self._plays.clear()

    def messages(self, completion: Completion) -> list[dict[str, Any]]:
        """Return the messages of the last branch behind its beginning, on the leading rank."""
        return self._messages.get(completion.row_id, [])


def last_turn(completion: Completion) -> SampledTurn:
    """Return what the model has said last."""
    begin = last_turn_begin(completion)
    return SampledTurn(
        completion.token_ids[begin:],
        completion.logprobs[begin:],
        completion.weight_versions[begin:],
        completion.finish_reason,
    )
