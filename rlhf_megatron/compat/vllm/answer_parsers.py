"""vLLM's parsers of tool calls and reasoning, by vLLM's names, on whole answers of this process's engine."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

Parser = Callable[[str, Any], Any]


class UnusableParser(Exception):
    """A parser that vLLM does not have, or that cannot be imported; the text is for the user."""


def tool_parser(name: str, tokenizer: Any) -> Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]:
    """Return vLLM's parser `name`: (text of an answer, tools) -> (text without calls, (function, arguments) of each).

    Arguments are text, JSON where the model wrote some; a call that cannot be read stays in the text.

    Args:
        name: as in vLLM's --tool-call-parser.
        tokenizer: of transformers.

    Raises:
        UnusableParser: there is none.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager

    made = _class_of(name, ToolParserManager.get_tool_parser, ToolParserManager.list_registered)

    def parse(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        described = [ChatCompletionToolsParam(**tool) for tool in tools]
        request = ChatCompletionRequest(messages=[], model="policy", tools=described)
        # A parser keeps the state of a stream, so each answer has one of its own.
        found = made(tokenizer, described).extract_tool_calls(text, request)
        if not found.tools_called:
            return text, []
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


def reasoning_parser(name: str, tokenizer: Any) -> Callable[[str], tuple[str, str]]:
    """Return vLLM's parser `name`: text of an answer -> (reasoning, what follows it).

    Raises:
        UnusableParser: there is none.
    """
    from vllm.reasoning import ReasoningParserManager

    parser = _class_of(name, ReasoningParserManager.get_reasoning_parser, ReasoningParserManager.list_registered)(
        tokenizer
    )

    def parse(text: str) -> tuple[str, str]:
        reasoning, content = parser.extract_reasoning(text, types.SimpleNamespace())
        return reasoning or "", content or ""

    return parse


def _class_of(name: str, get: Callable[[str], Any], listed: Callable[[], list[str]]) -> Any:
    try:
        return get(name)
    except ImportError as error:
        raise UnusableParser(f"vLLM's parser {name} needs {error.name or error}; install it") from error
    except Exception as error:
        raise UnusableParser(f"vLLM has no parser {name}; it has {', '.join(sorted(listed()))}") from error
