"""One program's side of a row: its requests, one at a time, become turns of the engine's.

All of it happens in the endpoint's thread, but for ``next_event``, which the thread of the engine calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

from rlhf_megatron.agents.answer_tree import AnswerTree, Plan
from rlhf_megatron.agents.message_parsing import AnswerReader
from rlhf_megatron.agents.protocol import Answer, Message, Question, Refusal
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.rewards.answers import Outcome
from rlhf_megatron.rollout.engine import Completion

_UNHEARD = -1  # the number of an answer that came after its program's end


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of every trajectory, in tokens and requests."""

    max_length: int  # of a prompt and its turns
    max_response_length: int  # of what follows a prompt
    max_turns: int


class Asked(NamedTuple):
    """A request that the engine is to answer: tokens that follow the row so far, or a whole prompt of another branch.

    Attributes:
        kept: how many tokens stay of the completion before; None: all.
    """

    token_ids: list[int]
    branches: bool
    max_tokens: int
    kept: int | None


class Ended(NamedTuple):
    """The program's end; ``refused``: it had asked for more turns or tokens than there are."""

    outcome: Outcome
    refused: bool
    kept: int | None


Event = Asked | Ended


@dataclasses.dataclass(eq=False)
class _Request:
    """A question and who waits for its answer."""

    question: Question
    digest: str
    answer: asyncio.Future[Answer]
    plan: Plan | None = None


class AgentTrajectory:
    """The requests of one program, which the engine answers in the order in which they come.

    Attributes:
        messages: the conversation that was continued last, its answer included.
        rendered: see AnswerTree.
    """

    def __init__(self, tokenizer: Tokenizer, reader: AnswerReader, end_token: int, limits: Limits, seed: int) -> None:
        """Set up; ``seed``: ids of calls and responses follow from it, so that a run repeats."""
        self._tokenizer, self._reader, self._limits, self._seed = tokenizer, reader, limits, seed
        self._end_token, self._tree = end_token, AnswerTree(end_token)
        self._of_tools: dict[str, Tokenizer] = {}
        self._waiting: deque[_Request] = deque()
        self._by_digest: dict[str, _Request] = {}
        self._in_flight: _Request | None = None
        self._future: Future[Event] | None = None  # that the engine's thread waits for
        self._outcome: Outcome | None = None
        self._kept: int | None = None
        self._responses: dict[str, list[Message]] = {}  # conversations, by the id of their response
        self._before, self._row_begin = 0, 0  # tokens so far of the row, and of its prompt
        self._asked, self._refused = 0, False
        self.messages: list[Message] = []

    @property
    def rendered(self) -> int:
        """See AnswerTree."""
        return self._tree.rendered

    # ---- of programs

    async def ask(self, question: Question, digest: str, is_retry: bool) -> Answer:
        """Return the answer to a question; a retry joins the request of the same digest.

        Raises:
            Refusal: there is none: the program has ended, or it is too long.
        """
        request = self._by_digest.get(digest) if is_retry else None
        if request is None:
            if self._outcome is not None:
                raise Refusal("this trajectory has ended", 410, "trajectory_ended")
            request = _Request(question, digest, asyncio.get_running_loop().create_future())
            self._by_digest[digest] = request
            self._waiting.append(request)
            self._serve()
        return await asyncio.shield(request.answer)

    def conversation(self, response_id: str) -> list[Message]:
        """Return the messages up to a response of this trajectory. Raises Refusal where there is none."""
        if response_id not in self._responses:
            raise Refusal("previous_response_id is of no response of this trajectory", 404, "not_found")
        return self._responses[response_id]

    def note_response(self, response_id: str, question: Question, answer: Answer) -> None:
        """Keep the conversation of a response."""
        self._responses[response_id] = [*question.messages, answer.message]

    def identity(self, number: int) -> str:
        """Return the id of an answer, the same in every run."""
        return hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=12).hexdigest()

    # ---- of the engine

    def expect(self, completion: Completion, future: Future[Event]) -> None:
        """Deliver a turn of the engine's, if there is one, and settle ``future`` with what comes next."""
        self._future = future
        if completion.token_ids:
            self._deliver(completion)
        self._serve()

    def end(self, outcome: Outcome) -> None:
        """Note the program's end."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        gone = [*self._waiting, *([self._in_flight] if self._in_flight else [])]
        self._waiting.clear()
        for request in gone:
            _refuse(request, Refusal("this trajectory has ended", 410, "trajectory_ended"))
        self._serve()

    def _serve(self) -> None:
        """Hand the engine the next request, or the end, if it waits."""
        if self._future is None:
            return
        event: Event | None = None
        if self._outcome is not None:
            event = Ended(self._outcome, self._refused, self._kept)
        while event is None and self._waiting:
            event = self._planned(self._waiting.popleft())
        if event is not None:
            future, self._future, self._kept = self._future, None, None
            if future.set_running_or_notify_cancel():  # else the generation has ended, and nobody waits
                future.set_result(event)

    def _planned(self, request: _Request) -> Asked | None:
        """Return a request in tokens; None where it is refused, which its program hears."""
        question = request.question
        try:
            if self._asked >= self._limits.max_turns:
                raise self._over(f"this trajectory has had its {self._limits.max_turns} answers", "turns_exceeded")
            plan = self._tree.plan(question.messages, self._tokenizer_of(question), question.tools)
            goes_on = plan.parent is not None and plan.parent == self._tree.latest
            begin = self._row_begin if goes_on else len(plan.prompt)
            room = min(
                self._limits.max_length - len(plan.prompt), begin + self._limits.max_response_length - len(plan.prompt)
            )
            if room < 1:
                raise self._over(f"{len(plan.prompt)} tokens leave no room for an answer", "context_length_exceeded")
        except DataError as error:
            _refuse(request, Refusal(str(error)))
            return None
        except Refusal as refusal:
            _refuse(request, refusal)
            return None
        self._asked += 1
        self._in_flight, request.plan = request, plan
        first = self._tree.latest is None
        self._row_begin = begin
        most = min(room, question.max_tokens or room)
        return Asked(plan.tail if goes_on else plan.prompt, not goes_on and not first, most, self._kept)

    def _over(self, text: str, code: str) -> Refusal:
        self._refused = True
        return Refusal(f"{text} (docs/agents.md#limits)", 400, code)

    def _tokenizer_of(self, question: Question) -> Tokenizer:
        """Return the tokenizer whose template describes the question's tools."""
        if question.tools is None:
            return self._tokenizer
        key = repr(question.tools)
        if key not in self._of_tools:
            self._of_tools[key] = self._tokenizer.with_template_names(tools=question.tools)
        return self._of_tools[key]

    def _deliver(self, completion: Completion) -> None:
        """Answer the request that is in flight by the last turn of a completion."""
        request, self._in_flight = self._in_flight, None
        assert request is not None and request.plan is not None, "the engine answers what was asked"
        begin = last_turn_begin(completion)
        number = (self._tree.latest if self._tree.latest is not None else -1) + 1
        read = self._reader.read(
            completion.token_ids[begin:], completion.finish_reason, request.question, self.identity(number)
        )
        kept = begin + read.kept
        self._kept = kept if kept < len(completion.token_ids) else None
        tokens, logprobs = completion.token_ids[begin:kept], completion.logprobs[begin:kept]
        self._tree.commit(request.plan, read.forms, tokens)
        self.messages = [*request.question.messages, read.message]
        answer = Answer(read.message, read.finish_reason, len(request.plan.prompt), tokens, logprobs, number)
        if not request.answer.done():
            request.answer.set_result(answer)


def last_turn_begin(completion: Completion) -> int:
    """Return where the tokens of the last turn begin; before them are what others have said and earlier turns."""
    marks = completion.sampled
    if marks is None:
        return 0
    return max((index + 1 for index, own in enumerate(marks) if not own), default=0)


def _refuse(request: _Request, refusal: Refusal) -> None:
    if not request.answer.done():
        request.answer.set_exception(refusal)
        request.answer.exception()  # also where nobody waits any more
