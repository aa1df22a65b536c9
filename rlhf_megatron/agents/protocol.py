"""Parts that both APIs share: a request as it is sampled, messages in the chat template's form, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.untrusted import parse_json

Message = dict[str, Any]

# Of a conversation; and of what stops a turn.
MOST_MESSAGES, MOST_STOPS = 10_000, 16


class Refusal(Exception):
    """A request that is not carried out; the text is for the program.

    Attributes:
        status: of HTTP; clients ask again for 408, 409, 429 and 5xx alone.
        code: as OpenAI has it, such as "context_length_exceeded".
    """

    def __init__(self, text: str, status: int = 400, code: str = "invalid_request") -> None:
        """Remember what to say."""
        super().__init__(text)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the error as the clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Question:
    """A request to the model.

    Attributes:
        messages: in the chat template's form; contents are text, arguments of tool calls are objects.
        tools: as the chat template describes them; None for none.
        max_tokens: of the answer, at most; None for what is left.
        stop: texts before which the answer ends.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer of the model.

    Attributes:
        message: role, content, and tool_calls or reasoning_content where there are some.
        finish_reason: stop, length or tool_calls.
        token_ids: those that were sampled and stay.
        number: of the answer in its trajectory, from which ids of calls and responses follow.
    """

    message: Message
    finish_reason: str
    prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float]
    number: int


class _NoObject(UserError):
    """Arguments that are no JSON."""


def text_of(content: Any, where: str) -> str:
    """Return a message's content, a text or a list of parts of text, as text. Raises Refusal for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"{where}.content is {type(content).__name__}; send a text or a list of parts")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    for key in ("text", "refusal"):
        if isinstance(part, dict) and isinstance(part.get(key), str):
            return str(part[key])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise Refusal(f"{where} has a part of type {str(kind)[:40]}; only text is supported")


def role_of(message: Any, where: str) -> str:
    """Return a message's role as chat templates know it. Raises Refusal where there is none."""
    role: str = field(message, "role", str, where)
    return "system" if role == "developer" else role


def listed_tools(body: dict[str, Any]) -> list[Any]:
    """Return the tools of a request, unread; none with tool_choice none. Raises Refusal where they are no list."""
    tools = body.get("tools")
    if not tools or body.get("tool_choice") == "none":
        return []
    if not isinstance(tools, list):
        raise Refusal("tools must be a list")
    return tools


def arguments_of(arguments: Any, where: str) -> Any:
    """Return a call's arguments as chat templates want them: an object, or the text where that is none."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments or "{}", where, _NoObject)
    except _NoObject:
        return arguments


def positive(value: Any, name: str) -> int | None:
    """Return a number of tokens. Raises Refusal for what is none."""
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise Refusal(f"{name} must be a whole number above 0")
    return value


def stops_of(stop: Any) -> tuple[str, ...]:
    """Return the texts that stop an answer. Raises Refusal for anything else."""
    listed = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(listed, Sequence) or len(listed) > MOST_STOPS:
        raise Refusal(f"stop must be a text or a list of up to {MOST_STOPS}")
    if not all(isinstance(each, str) and each for each in listed):
        raise Refusal("stop must hold texts that are not empty")
    return tuple(listed)


def field(container: Any, name: str, kind: type | tuple[type, ...], where: str) -> Any:
    """Return a field of an object. Raises Refusal where it is missing or of another type."""
    if not isinstance(container, dict) or not isinstance(container.get(name), kind):
        raise Refusal(f"{where}.{name} is missing or of another type")
    return container[name]
