"""Harmony, the form of gpt-oss's answers: messages, each with a channel and perhaps the tool that it calls.

vLLM reads it from token ids, with files that openai_harmony downloads. This reads the same from text in which control
tokens are written out (https://cookbook.openai.com/articles/openai-harmony), and needs none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

_BEGIN, _BODY = "<|start|>assistant", "<|message|>"
_END = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class _Part(NamedTuple):
    """A message of an answer: ``recipient`` names the tool that it calls."""

    channel: str
    recipient: str | None
    content: str


class HarmonyCalls:
    """Calls of gpt-oss, with the methods of ``ToolParser``: a turn has one, ended by a control token of its own."""

    def __call__(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        """Return the text for the user, without reasoning, and the calls as (function, arguments)."""
        parts = list(_parts(text))
        calls = [(each.recipient.removeprefix("functions."), each.content) for each in parts if each.recipient]
        return _told(parts), calls

    def begun(self, text: str) -> int:
        """Return how many calls a text has; one that is not whole has no arguments."""
        return sum(each.recipient is not None for each in _parts(text))


def harmony_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning of an answer, and what follows it: as it was written where that calls a tool."""
    parts = list(_parts(text))
    reasoning = "\n".join(each.content for each in parts if _is_reasoning(each))
    return reasoning, text if any(each.recipient for each in parts) else _told(parts)


def _is_reasoning(part: _Part) -> bool:
    return part.channel == "analysis" and part.recipient is None


def _told(parts: list[_Part]) -> str:
    return "\n".join(each.content for each in parts if each.recipient is None and each.channel != "analysis")


def _parts(text: str) -> Iterator[_Part]:
    """Yield the messages of an answer, whose first has its header in the prompt; other text is one without a
    channel."""
    for part in text.split(_BEGIN):
        header, _, content = part.partition(_BODY)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if channel:
            yield _Part(channel[1], recipient[1] if recipient else None, _END.split(content)[0])
        elif part.strip():
            yield _Part("", None, part)
