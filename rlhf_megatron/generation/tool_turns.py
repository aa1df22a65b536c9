"""Turns in which the model calls tools: what it calls, what it is told, and the counts of both.

Calls are read here, by vLLM's parsers, and run one after another in the row's process (partners.py). What the model
got wrong is answered at once by a message that says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from rlhf_megatron.agents.message_parsing import AnswerReader
from rlhf_megatron.agents.protocol import Question
from rlhf_megatron.agents.trajectory import last_turn_begin
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tool_template import call_end_token, encode_results
from rlhf_megatron.errors import DataError, RolloutError
from rlhf_megatron.generation.partners import ToolCalls, TurnTools
from rlhf_megatron.recipe import MultiTurnSection, RolloutRecipe
from rlhf_megatron.rewards.answers import Message, Outcome
from rlhf_megatron.rewards.worker import DONE, UNUSABLE
from rlhf_megatron.rollout.engine import Completion
from rlhf_megatron.topology.exchange import from_rank, refused_by_all
from rlhf_megatron.untrusted import shown

_UNREADABLE = "error: this call cannot be read; write it in the form that was described"


@dataclasses.dataclass
class ToolCounts:
    """Calls of one tool: how many, how many failed, the seconds of all, and results that were cut."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    truncated: int = 0


class _Answer(NamedTuple):
    """The answer to a call, of a tool if there is one of that name."""

    text: str
    tool: str | None = None
    failed: bool = False
    seconds: float = 0.0


@dataclasses.dataclass
class _Turn:
    """A turn whose calls are being answered.

    Attributes:
        message: the assistant's, with ``tool_calls`` as they stand in the conversation.
        end: the token that ended it.
        answers: by the place of the call.
        unusable: why no call can be run at all.
        begun: when the call that is running began.
    """

    message: dict[str, Any]
    end: int
    unread: int = 0
    answers: dict[int, _Answer] = dataclasses.field(default_factory=dict)
    unusable: Outcome | None = None
    begun: float = dataclasses.field(default_factory=time.monotonic)
    future: Future[Outcome] = dataclasses.field(default_factory=Future)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls that could be read."""
        return self.message.get("tool_calls", [])


class ToolTurns:
    """The tools of one generation of a replica.

    Attributes:
        counts: by tool, of those that were called.
        malformed: calls that could not be read, of tools that there are not, or with wrong arguments.
    """

    def __init__(self, section: MultiTurnSection, tokenizer: Tokenizer, leads: bool) -> None:
        """Set up; ``tokenizer`` describes the tools. Raises RolloutError where vLLM has not the parsers, or where the
        chat template does not say where a turn with calls ends."""
        self._tokenizer, self._seconds = tokenizer, section.timeout_seconds
        self.tools: dict[str, dict[str, Any]] = {each["function"]["name"]: each["function"] for each in tokenizer.tools}
        end = call_end_token(tokenizer, next(iter(self.tools)))
        if end is None:
            raise RolloutError(
                "rollout.multi_turn.tools: the chat template does not render tool calls and results, or ends calls by "
                "no token that stops the model; give one that does, by data.chat_template"
            )
        self.end_token = end
        self._reader = AnswerReader(section, tokenizer, "rollout.multi_turn") if leads else None
        self.counts: dict[str, ToolCounts] = defaultdict(ToolCounts)
        self.malformed = 0
        self._turns: dict[int, _Turn] = {}  # by row

    def ask(self, trajectory: ToolCalls, completion: Completion) -> Future[Outcome]:
        """Run the calls of a row's last turn in their order; return at once. A turn without any ends the row."""
        turn = self._turns[completion.row_id] = self._read(completion)
        if not turn.calls:
            told = (self._unreadable(),) if turn.unread else ()
            turn.future.set_result(Outcome(DONE, messages=told, ends=not told))
            return turn.future
        valid = []
        for index, call in enumerate(turn.calls):
            wrong = self._what_is_wrong(call["function"])
            if wrong is None:
                valid.append(index)
            else:
                turn.answers[index] = _Answer(f"error: {wrong}")
        if not valid:
            self._settle(turn)
        for index in valid:
            self._start(trajectory, turn, index)
        return turn.future

    def _read(self, completion: Completion) -> _Turn:
        assert self._reader is not None, "only the rank that leads asks"
        tokens = completion.token_ids[last_turn_begin(completion) :]
        marks = completion.sampled or ()
        number = sum(before and not own for before, own in itertools.pairwise(marks))
        read = self._reader.read(tokens, completion.finish_reason, Question([], self._tokenizer.tools), str(number))
        return _Turn(read.message, tokens[-1], read.unread)

    @staticmethod
    def _unreadable() -> Message:
        return {"role": "user", "content": _UNREADABLE}

    def _what_is_wrong(self, call: Mapping[str, Any]) -> str | None:
        """Return why a call cannot be run as it is written."""
        name, arguments = call["name"], call["arguments"]
        if name not in self.tools:
            return f"there is no tool {shown(str(name), 80)}; there are {', '.join(self.tools)}"
        if not isinstance(arguments, dict):
            return f"the arguments of {name} are no JSON object"
        schema = self.tools[name].get("parameters") or {}
        missing = [each for each in schema.get("required") or () if each not in arguments]
        if missing:
            return f"{name} needs the argument {missing[0]}"
        known = schema.get("properties", arguments)  # a server may take any
        more = [] if schema.get("additionalProperties") else [each for each in arguments if each not in known]
        return f"{name} has no argument {shown(more[0], 80)}; it has {', '.join(known) or 'none'}" if more else None

    def _start(self, trajectory: ToolCalls, turn: _Turn, index: int) -> None:
        called = turn.calls[index]["function"]

        def take(future: Future[Outcome]) -> None:  # in the thread of the row's process
            now = time.monotonic()
            seconds, turn.begun = now - turn.begun, now  # the next one begins as this one ends
            error = future.exception()
            outcome = Outcome(UNUSABLE, message=f"{type(error).__name__}: {error}") if error else future.result()
            failed = outcome.state != DONE
            if outcome.state == UNUSABLE:
                turn.unusable = outcome
            text = self._why_failed(outcome) if failed else outcome.messages[0]["content"]
            turn.answers[index] = _Answer(text, called["name"], failed, seconds)
            if len(turn.answers) == len(turn.calls):
                self._settle(turn)

        trajectory.call(called["name"], called["arguments"]).add_done_callback(take)

    def _why_failed(self, outcome: Outcome) -> str:
        return f"error: {outcome.message or f'no answer within {self._seconds:g} seconds'}"

    @staticmethod
    def _settle(turn: _Turn) -> None:
        told: list[Message] = [{"role": "tool", "content": answer.text} for _, answer in sorted(turn.answers.items())]
        if turn.unread:
            told[-1]["content"] += f"\n{_UNREADABLE}"
        if not turn.future.done() and turn.future.set_running_or_notify_cancel():
            turn.future.set_result(turn.unusable or Outcome(DONE, messages=tuple(told)))

    def count(self, row_id: int, whole: Sequence[Message], cut: Sequence[Message]) -> None:
        """Count the calls of a row's last turn, whose answers are ``whole`` and which the model hears as ``cut``."""
        turn = self._turns[row_id]
        self.malformed += turn.unread
        for index, answer in turn.answers.items():
            if answer.tool is None:
                self.malformed += 1
                continue
            counts, is_cut = self.counts[answer.tool], whole[index] != cut[index]
            counts.calls, counts.failed = counts.calls + 1, counts.failed + answer.failed
            counts.seconds, counts.truncated = counts.seconds + answer.seconds, counts.truncated + is_cut

    def encode(self, row_id: int, messages: Sequence[Message]) -> list[int] | None:
        """Return the tokens of the answers to a row's last turn; None where nothing follows how the turn ended."""
        turn = self._turns.pop(row_id)
        if not turn.calls:
            return self._tokenizer.encode_next_turn(messages) if turn.end == self._tokenizer.turn_end_token() else None
        if turn.end != self.end_token:  # gpt-oss ends calls by another token than answers
            return None
        answers = [
            {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
            for message, call in zip(messages, turn.calls, strict=True)
        ]
        return encode_results(self._tokenizer, turn.message, turn.end, answers)


def with_tools(tokenizer: Tokenizer, recipe: RolloutRecipe) -> Tokenizer:
    """Return a recipe's tokenizer with the tools of ``rollout.multi_turn.tools`` for its chat template; collective over
    the world, of which the first rank asks functions and servers. Raises RolloutError where they cannot be described.
    """
    section = recipe.rollout.multi_turn
    if section is None or not section.tools:
        return tokenizer
    from torch import distributed

    if not distributed.is_initialized():
        return described(tokenizer, section)
    tools: list[dict[str, Any]] = []
    with refused_by_all():
        if distributed.get_rank() == 0:
            tools = described(tokenizer, section).tools
    return tokenizer.with_template_names(tools=from_rank(tools))


def described(tokenizer: Tokenizer, section: MultiTurnSection) -> Tokenizer:
    """Return a tokenizer whose template describes the tools of a recipe's section; see ``with_tools``."""
    with contextlib.closing(TurnTools(section, describes=True)) as partner:
        tools = partner.describe()
    if not tools:
        raise RolloutError("rollout.multi_turn.tools: the servers list no tools")
    other = tokenizer.with_template_names(tools=tools)
    try:
        rendered = other.render_chat([{"role": "user", "content": "x"}])
    except DataError as error:
        raise RolloutError(f"rollout.multi_turn.tools: {error}") from error
    if tools[0]["function"]["name"] not in rendered:
        raise RolloutError(
            "rollout.multi_turn.tools: the chat template does not tell the model about tools; give one that does, by "
            "data.chat_template"
        )
    return other
