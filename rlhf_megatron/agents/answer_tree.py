"""From a program's messages to the tokens that were sampled: the answers of one trajectory, as a tree.

A request continues the deepest answer whose conversation is a prefix of its own; only what follows it is rendered and
tokenized. Pure: it knows no HTTP and no engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from rlhf_megatron.errors import DataError

Message = dict[str, Any]

# Who may follow an answer that is continued; after an answer of its own making, a program has written the model's part.
_CONTINUING = ("user", "tool", "system")


class Renderer(Protocol):
    """Messages to tokens by a chat template; ``data.tokenizer.Tokenizer`` is one."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a whole conversation, up to and with the header of the assistant's next turn."""
        ...

    def encode_next_turn(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens behind the end of an assistant's turn that ``messages`` follow; raises DataError."""
        ...


@dataclasses.dataclass(frozen=True)
class Plan:
    """A request in tokens.

    Attributes:
        parent: the answer that it continues; None where all of it was rendered.
        digest: of its conversation.
        prompt: all of its tokens.
        tail: those that follow the parent's answer.
    """

    parent: int | None
    digest: str
    prompt: list[int]
    tail: list[int]


@dataclasses.dataclass(frozen=True)
class _Answer:
    """Tokens of an answer and of what was rendered in front of it since the parent's."""

    parent: int | None
    token_ids: list[int]


class AnswerTree:
    """The answers of one trajectory.

    Attributes:
        latest: number of the newest answer; None before the first.
        rendered: how often a request after the first continued no answer, so that all of it was rendered.
    """

    def __init__(self, end_token: int) -> None:
        """Set up; ``end_token``: what the chat template puts behind an assistant's turn."""
        self._end_token = end_token
        self._answers: list[_Answer] = []
        self._by_digest: dict[str, int] = {}
        self.rendered = 0

    @property
    def latest(self) -> int | None:
        """Number of the newest answer."""
        return len(self._answers) - 1 if self._answers else None

    def plan(self, messages: Sequence[Message], renderer: Renderer, tools: Any = None) -> Plan:
        """Return the tokens of a request; ``tools`` are what ``renderer`` describes to the model.

        Raises:
            DataError: the chat template refuses the conversation.
        """
        chain = digests(messages, tools)
        used = next((length for length in range(len(messages), 0, -1) if chain[length] in self._by_digest), 0)
        tail = messages[used:]
        if used and tail and all(message["role"] in _CONTINUING for message in tail):
            parent = self._by_digest[chain[used]]
            before = self.token_ids(parent)
            try:
                behind = renderer.encode_next_turn(tail)
            except DataError:  # a template that renders a tail otherwise by what precedes it
                behind = []
            if behind:
                # An answer that was cut off ends here all the same; the model did not sample that.
                close = [] if before[-1] == self._end_token else [self._end_token]
                return Plan(parent, chain[-1], [*before, *close, *behind], [*close, *behind])
        whole = renderer.encode_chat(messages)
        self.rendered += bool(self._answers)
        return Plan(None, chain[-1], whole, whole)

    def commit(self, plan: Plan, messages: Sequence[Message], token_ids: Sequence[int]) -> int:
        """Record the answer to a request: what was sampled, and the forms in which it may come back. Returns its
        number."""
        answer = len(self._answers)
        self._answers.append(_Answer(plan.parent, [*plan.tail, *token_ids]))
        self._by_digest.update((_next_digest(plan.digest, message), answer) for message in messages)
        return answer

    def token_ids(self, answer: int) -> list[int]:
        """Return the tokens of a conversation up to the end of an answer."""
        parts, index = [], answer
        while True:
            parts.append(self._answers[index].token_ids)
            parent = self._answers[index].parent
            if parent is None:
                return [token for part in reversed(parts) for token in part]
            index = parent


def digests(messages: Sequence[Message], tools: Any = None) -> list[str]:
    """Return a digest of each beginning of a conversation, that of no message first."""
    chain = [_digest(["tools", tools])]
    for message in messages:
        chain.append(_next_digest(chain[-1], message))
    return chain


def _next_digest(before: str, message: Message) -> str:
    """Digest what counts: messages are the same where role, stripped text, tool calls and the call that is answered
    are; ids of an assistant's calls, its reasoning and unknown fields do not count."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    content = (message.get("content") or "").strip()
    return _digest([before, message["role"], content, calls, message.get("tool_call_id")])


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
