"""Multi-turn responses: a user's function, tools or environment reply between the model's turns (partners.py).

The rank that leads a replica asks it; the reply goes through the chat template, and its tokens are appended to the
model's, marked as not sampled (``rollout.scheduler``).
"""

from __future__ import annotations

import base64
import dataclasses
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from rlhf_megatron.agents.program import AgentProgram
from rlhf_megatron.agents.trajectory import last_turn_begin
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError, RolloutError
from rlhf_megatron.generation.agent_turns import AgentTurns
from rlhf_megatron.generation.journal import JournaledCall, is_failed
from rlhf_megatron.generation.partners import Partner, ToolCalls, Trajectory, why_failed
from rlhf_megatron.generation.prompt_groups import Group, turns_of_model
from rlhf_megatron.generation.tool_turns import ToolTurns
from rlhf_megatron.recipe import MultiTurnSection, RolloutRecipe
from rlhf_megatron.rewards.answers import Message, Outcome
from rlhf_megatron.rewards.user_environment import LENGTH, TURNS
from rlhf_megatron.rollout.engine import Completion, EnvironmentReply

Tokens = TypeVar("Tokens", list[int], list[int] | None)


@dataclasses.dataclass
class TurnCounts:
    """Outcomes of one replica's calls.

    Attributes:
        answers: that the model was given; ``cut`` of them were too long.
        ended: responses that the function or the environment ended.
        failed: calls.
        branches: rows beyond a trajectory's first, of conversations that were rewritten.
        calls, seconds, slowest: how many were answered, and the time that they took, of all and of the longest.
        replayed, resumed, restarted: trajectories that a killed run had begun; see JournaledCall.
    """

    answers: int = 0
    ended: int = 0
    failed: int = 0
    cut: int = 0
    branches: int = 0
    calls: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    replayed: int = 0
    resumed: int = 0
    restarted: int = 0

    def count_call(self, seconds: float) -> None:
        """Count an answer that took so long."""
        self.calls, self.seconds, self.slowest = self.calls + 1, self.seconds + seconds, max(self.slowest, seconds)


class _Managed(NamedTuple):
    """Outcome of a context function on a conversation, the reply that this ends with, and its environment's state."""

    outcome: Outcome
    reply: EnvironmentReply
    saved: str | None


class Conversations:
    """The turns of one generation of a replica; ``rollout.engine.Environment``. A context manager, at whose end no
    trajectory is left open."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        section: MultiTurnSection,
        partner: Partner | None,
        groups: Sequence[Group],
        responses_per_prompt: int,
        tokenizer: Tokenizer,
        seed_of: Callable[[int], int],
        journal: JournaledCall | None = None,
    ) -> None:
        """Set up; row ``i * responses + k`` is response k to the prompt of group i. ``section``: rollout.multi_turn.
        ``partner`` is on the rank that leads. ``seed_of``: a row's; an environment gets that of the group's first, so
        that all of a group begin alike. ``journal``: has what there is of rows already, and gets their turns.

        Raises RolloutError where the chat template does not say where a turn of the model's ends.
        """
        self._section, self._partner, self._tokenizer = section, partner, tokenizer
        self._groups, self._responses, self._seed_of = groups, responses_per_prompt, seed_of
        self._most_prompt_tokens = recipe.data.max_prompt_length
        self.repeatable, self.opens = recipe.rollout_repeats, recipe.has_environment
        self.tools = ToolTurns(self._section, tokenizer, partner is not None) if recipe.has_tools else None
        end = tokenizer.turn_end_token()
        if end is None and self.tools is None:
            raise RolloutError(
                "rollout.multi_turn: the chat template puts no control token after an assistant's turn; give one that "
                "does, by data.chat_template"
            )
        self._end_tokens = {end, self.tools.end_token} if self.tools else {end}
        self._trajectories: dict[int, Trajectory] = {}  # by row, of those that have begun and not ended
        self._openings: dict[int, list[Message]] = {}  # by row: what was observed before the first turn
        self._answers: dict[int, list[list[Message]]] = defaultdict(list)  # by row, then by the turn that it follows
        self._answered: dict[int, float] = {}  # seconds until an answer came, by row
        # Of rows whose conversation was rewritten: with what it goes on, and what was said behind the prompt before.
        self._rewritten: dict[int, list[Message]] = {}
        self._before: dict[int, list[Message]] = {}
        self._replayed: dict[int, list[Message]] = {}  # the whole of those that had ended when a run was killed
        self.counts = TurnCounts()
        self._journal = journal
        if journal:
            self.counts.replayed, self.counts.resumed = journal.replayed, journal.resumed
            self.counts.restarted = journal.restarted
        for row_id, row in journal.rows.items() if journal else ():
            self._openings[row_id], self._answers[row_id] = row.opening, list(row.answers)
            if row.messages is not None:
                self._replayed[row_id] = row.messages

    def goes_on(self, completion: Completion) -> bool:
        """See Environment."""
        return self.opens or self._ending(completion) is None

    def _ending(self, completion: Completion) -> str | None:
        """Return why the model says nothing after its last turn, whatever the reply; None where it may."""
        if completion.finish_reason == "length":
            return LENGTH
        turns = completion.turns + sum(branch.turns for branch in completion.branches)
        is_last = turns >= self._section.max_assistant_turns
        return TURNS if is_last or completion.token_ids[-1] not in self._end_tokens else None

    def ask(self, completion: Completion) -> Future[Any]:
        """See Environment."""
        assert self._partner is not None, "only the rank that leads asks"
        trajectory, asked = self._trajectory(completion.row_id), time.monotonic()
        if not completion.token_ids:
            answer = trajectory.reset()
        elif self.tools:
            assert isinstance(trajectory, ToolCalls)
            answer = self.tools.ask(trajectory, completion)
        elif self.opens:  # an environment gets the last turn alone
            said = self._tokenizer.decode(completion.token_ids[last_turn_begin(completion) :])
            answer = trajectory.reply([{"role": "assistant", "content": said}], self._ending(completion))
        else:
            answer = trajectory.reply(self._conversation(completion), self._ending(completion))
        answer.add_done_callback(lambda _: self._answered.update({completion.row_id: time.monotonic() - asked}))
        return answer

    def _trajectory(self, row_id: int) -> Trajectory:
        """Return the partner's side of a row, which begins or goes on here if it has not yet."""
        assert self._partner is not None
        if row_id not in self._trajectories:
            attempt = self._journal.begin(row_id) if self._journal else 1
            trajectory = self._trajectories[row_id] = self._partner.begin(self._row(row_id, attempt))
            before = self._journal.rows.get(row_id) if self._journal else None
            if before and before.state is not None:
                trajectory.load(base64.b64decode(before.state))
        return self._trajectories[row_id]

    def _row(self, row_id: int, attempt: int) -> dict[str, Any]:
        group = row_id // self._responses
        return self._groups[group].row(self._seed_of(group * self._responses)) | {"attempt": attempt}

    def read(self, completion: Completion, outcome: Outcome | _Managed) -> EnvironmentReply | Future[_Managed]:
        """See Environment. Raises RolloutError where the partner does not work, or the template refuses its reply."""
        assert self._partner is not None, "only the rank that leads asks"
        if isinstance(outcome, _Managed):
            return self._managed(completion, outcome)
        row_id, messages = completion.row_id, self._partner.messages_of(outcome)
        self.counts.count_call(self._answered.pop(row_id, 0.0))
        if messages is None:
            return self._failed(row_id, why_failed(outcome))
        reward = outcome.score if self.opens and completion.token_ids else None
        if outcome.ends or (completion.token_ids and self._ending(completion)):
            self.counts.ended += outcome.ends
            self._end(row_id)
            return EnvironmentReply(None, reward)
        cut = [message | {"content": self._cut(message["content"])} for message in messages]
        if not completion.token_ids:
            reply = self._opened(row_id, cut)
        else:
            reply = EnvironmentReply(self._tokens_of(row_id, messages, cut), reward)
            if reply.token_ids is None:
                self.counts.ended += 1
                self._end(row_id)
                return reply
            self._answers[row_id].append(cut)
            self.counts.answers += 1
            if self._partner.context:
                return self._manage(completion, reply, outcome.saved)
        return self._kept(completion, reply, outcome.saved)

    def _kept(self, completion: Completion, reply: EnvironmentReply, saved: str | None) -> EnvironmentReply:
        """Return a reply that is in the journal; rows of several branches are there as a whole, or begin again."""
        if self._journal and reply.token_ids is not None and completion.row_id not in self._rewritten:
            self._keep(completion.replied(reply), saved)
        return reply

    def _manage(self, completion: Completion, reply: EnvironmentReply, saved: str | None) -> Future[_Managed]:
        """Ask the context function about a conversation that the model is to go on with."""
        assert self._partner is not None and self._partner.context is not None
        prompt, managed = self._groups[completion.row_id // self._responses].prompt, Future[_Managed]()

        def take(asked: Future[Outcome]) -> None:  # in the thread of its process
            if managed.set_running_or_notify_cancel():
                managed.set_result(_Managed(asked.result(), reply, saved))

        conversation = self._conversation(completion)
        self._partner.context.call(conversation, prompt.ground_truth, prompt.extra_info).add_done_callback(take)
        return managed

    def _managed(self, completion: Completion, managed: _Managed) -> EnvironmentReply:
        """Return the reply where the conversation stays, or the prompt of another branch."""
        assert self._partner is not None and self._partner.context is not None
        row_id, messages = completion.row_id, self._partner.context.messages_of(managed.outcome)
        if messages is None:
            return self._failed(row_id, why_failed(managed.outcome))
        if not messages or messages == self._conversation(completion):
            return self._kept(completion, managed.reply, managed.saved)
        tokens = self._encoded(self._tokenizer.encode_chat, messages)
        if len(tokens) > self._most_prompt_tokens:
            why = f"what context returned has {len(tokens)} tokens, beyond data.max_prompt_length="
            return self._failed(row_id, f"{why}{self._most_prompt_tokens}")
        if self._journal and row_id not in self._rewritten:
            self._journal.begin_again(row_id)
        self._before[row_id] = [*self._so_far(row_id), *self._spoken(completion)]
        self._rewritten[row_id], self._answers[row_id] = messages, []
        self.counts.branches += 1
        return EnvironmentReply(tokens, managed.reply.reward, branches=True)

    def _keep(self, completion: Completion, state: str | None = None) -> None:
        assert self._journal is not None
        row_id = completion.row_id
        self._journal.keep(completion, self._openings.get(row_id, ()), self._answers[row_id], state)

    def end(self, completion: Completion) -> None:
        """Note that a row is whole; one whose environment failed gets another chance in a run that resumes."""
        if not self._journal or is_failed(completion):
            return
        if completion.branches:
            self._journal.keep_branches(completion, self.messages(completion) if self._partner else [])
        else:
            self._keep(completion)

    def _opened(self, row_id: int, observation: list[Message]) -> EnvironmentReply:
        """Return the beginning of a row: the prompt's messages and what is observed."""
        if not observation:
            return EnvironmentReply([])
        prompt = self._groups[row_id // self._responses].prompt
        tokens = self._encoded(self._tokenizer.encode_chat, [*prompt.messages, *observation])
        if len(tokens) > self._most_prompt_tokens:
            why = f"with what reset returned the prompt has {len(tokens)} tokens, beyond data.max_prompt_length="
            return self._failed(row_id, f"{why}{self._most_prompt_tokens}")
        self._openings[row_id] = observation
        return EnvironmentReply(tokens)

    def _tokens_of(self, row_id: int, whole: Sequence[Message], cut: Sequence[Message]) -> list[int] | None:
        """Return the tokens of a reply, which was longer before it was ``cut``; None where nothing can follow."""
        tools = self.tools
        if tools is None:
            return self._encoded(self._tokenizer.encode_next_turn, cut)
        tools.count(row_id, whole, cut)
        return self._encoded(lambda messages: tools.encode(row_id, messages), cut)

    def _encoded(self, encode: Callable[[Sequence[Message]], Tokens], messages: Sequence[Message]) -> Tokens:
        assert self._partner is not None
        try:
            return encode(messages)
        except DataError as error:
            raise RolloutError(f"{self._partner.key}: its reply is refused: {error}") from error

    def _failed(self, row_id: int, why: str) -> EnvironmentReply:
        """Return the end of a row whose reply did not come; what an environment would have given for it is not
        known."""
        self.counts.failed += 1
        self._end(row_id)
        if not self.opens:
            return EnvironmentReply(None)
        if self.counts.failed == 1:  # of this generation; the others are in rollout/turn_failures
            key = self._partner.key if self._partner else ""
            print(f"warning: {key}: a trajectory failed and is left out: {why}", file=sys.stderr, flush=True)
        return EnvironmentReply(None, math.nan)

    def _end(self, row_id: int) -> None:
        self._trajectories.pop(row_id).close()

    def __enter__(self) -> Conversations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for row_id in list(self._trajectories):
            self._end(row_id)

    def messages(self, completion: Completion) -> list[Message]:
        """Return the messages after the prompt, on the leading rank, without a reply that did not fit."""
        row_id, last = completion.row_id, completion.turns - 1
        if row_id in self._replayed:
            return self._replayed[row_id]
        return [*self._so_far(row_id), *self._spoken(completion, last)]

    def _so_far(self, row_id: int) -> list[Message]:
        """Return the messages between the prompt and the row's latest branch."""
        return self._before.get(row_id) or self._openings.get(row_id, [])

    def _spoken(self, completion: Completion, answered: int | None = None) -> list[Message]:
        """Return the turns of the latest branch, with the answers to all, or to the first so many of them."""
        own = [{"role": "assistant", "content": text} for text in turns_of_model(completion, self._tokenizer)]
        answers = self._answers[completion.row_id][:answered]
        told = [*answers, *[list[Message]()] * (len(own) - len(answers))]
        return [message for turn, replies in zip(own, told, strict=True) for message in (turn, *replies)]

    def _conversation(self, completion: Completion) -> list[Message]:
        """Return messages of the row's latest branch: those that it begins with, the model's turns and their
        answers."""
        prompt = self._groups[completion.row_id // self._responses].prompt
        begin = self._rewritten.get(completion.row_id) or [*prompt.messages, *self._so_far(completion.row_id)]
        return [*begin, *self._spoken(completion)]

    def _cut(self, text: str) -> str:
        tokens, most = self._tokenizer.encode(text), self._section.max_answer_tokens
        if len(tokens) <= most:
            return text
        self.counts.cut += 1
        return self._tokenizer.decode(tokens[:most], skip_special_tokens=False)


def conversations_of(
    recipe: RolloutRecipe,
    partner: Partner | AgentProgram | None,
    groups: Sequence[Group],
    responses_per_prompt: int,
    tokenizer: Tokenizer,
    seed_of: Callable[[int], int],
    journal: JournaledCall | None = None,
) -> Conversations | AgentTurns | None:
    """Return the turns of these groups, where responses have several; see Conversations and AgentTurns."""
    if recipe.rollout.agent is not None:
        program = partner if isinstance(partner, AgentProgram) else None
        return AgentTurns(recipe, program, groups, responses_per_prompt, tokenizer, seed_of, journal)
    section = recipe.rollout.multi_turn
    if section is None:
        return None
    assert not isinstance(partner, AgentProgram)
    return Conversations(recipe, section, partner, groups, responses_per_prompt, tokenizer, seed_of, journal)
