"""From the tokens of a turn to a program's message: text, reasoning, tool calls, and where a stop text ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from rlhf_megatron.agents.protocol import Message, Question, arguments_of
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.rollout import engine_registry


class ReadAnswer(NamedTuple):
    """A turn as a program gets it; ``kept``: how many of its tokens stay; ``stop``: the text that ended it;
    ``unread``: how many calls it begins beyond those that could be read."""

    message: Message
    finish_reason: str
    kept: int
    stop: str = ""
    unread: int = 0

    @property
    def forms(self) -> list[Message]:
        """Forms in which the turn may come back: some frameworks append the stop text, which its tokens have."""
        with_stop = self.message | {"content": self.message["content"] + self.stop}
        return [self.message, with_stop] if self.stop else [self.message]


class Parsers(Protocol):
    """The section of a recipe that names parsers, by vLLM's names."""

    @property
    def tool_parser(self) -> str | None:
        """Of tool calls."""

    @property
    def reasoning_parser(self) -> str | None:
        """Of reasoning."""


class AnswerReader:
    """Reader of turns by the parsers of a recipe. What it makes of a text changes no token."""

    def __init__(self, section: Parsers, tokenizer: Tokenizer, key: str = "rollout.agent") -> None:
        """Load the parsers of a section, whose ``key`` is for messages. Raises RolloutError where vLLM lacks one."""
        self._tokenizer = tokenizer
        load = engine_registry.tool_parser, engine_registry.reasoning_parser
        self._tools = _loaded(f"{key}.tool_parser", section.tool_parser, load[0], tokenizer)
        self._reasoning = _loaded(f"{key}.reasoning_parser", section.reasoning_parser, load[1], tokenizer)

    def read(self, token_ids: Sequence[int], finish_reason: str, question: Question, identity: str) -> ReadAnswer:
        """Return a turn as the program gets it; ids of its calls follow from ``identity``."""
        text, kept, stop = self._stopped(token_ids, question.stop)
        message: Message = {"role": "assistant", "content": text}
        if self._reasoning:
            reasoning, message["content"] = self._reasoning(text)
            if reasoning:
                message["reasoning_content"] = reasoning
        calls: list[tuple[str, str]] = []
        unread = 0
        if self._tools and question.tools:
            unread = self._tools.begun(message["content"])
            message["content"], calls = self._tools(message["content"], question.tools)
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{identity}_{index}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments_of(arguments, name)},
                }
                for index, (name, arguments) in enumerate(calls)
            ]
        reason = "tool_calls" if calls else "stop" if stop else finish_reason
        return ReadAnswer(message, reason, kept, stop, max(unread - len(calls), 0))

    def _stopped(self, token_ids: Sequence[int], stops: Sequence[str]) -> tuple[str, int, str]:
        """Return the text up to the first stop text, how many tokens are needed to say that, and which it is."""
        text = self._text(token_ids)
        matches = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
        if not matches:
            return text, len(token_ids), ""
        low, high = 1, len(token_ids)
        while low < high:
            middle = (low + high) // 2
            said = self._text(token_ids[:middle])
            if any(stop in said for stop in stops):
                high = middle
            else:
                low = middle + 1
        position, stop = min(matches)
        return text[:position], low, stop

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn; with parsers, control tokens within it are written out, as some mark calls by
        them."""
        if self._tools is None and self._reasoning is None:
            return self._tokenizer.decode(token_ids)
        own = token_ids[:-1] if token_ids and token_ids[-1] in self._tokenizer.stop_token_ids else token_ids
        return self._tokenizer.decode(own, skip_special_tokens=False)


def _loaded(key: str, name: str | None, load: Callable[[str, Any], Any], tokenizer: Tokenizer) -> Any:
    if name is None:
        return None
    try:
        return load(name, tokenizer.of_transformers)
    except engine_registry.UnusableParser as error:
        raise RolloutError(f"{key}={name}: {error}") from error
