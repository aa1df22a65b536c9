"""vLLM's parsers of tool calls and reasoning, by vLLM's names, on whole answers of this process's engine."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

from rlhf_megatron.compat.vllm.harmony import HarmonyCalls, harmony_reasoning

Parser = Callable[[str, Any], Any]


class UnusableParser(Exception):
    """A parser that vLLM does not have, or that cannot be imported; the text is for the user."""


class ToolParser:
    """vLLM's parser of tool calls: (text of an answer, tools) -> (text without calls, (function, arguments) of each).

    Arguments are text, JSON where the model wrote some; a call that cannot be read stays in the text.
    """

    def __init__(self, name: str, parser_class: Any, tokenizer: Any) -> None:
        """See ``tool_parser``."""
        self._class, self._tokenizer = parser_class, tokenizer
        # It logs a traceback for each call that a model got wrong; these are counted and answered.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            self._mark, self._is_bare = _mark_of(self._class(tokenizer, []))
        except Exception as error:
            raise UnusableParser(f"vLLM's parser {name} refuses this tokenizer: {error}") from error

    def __call__(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        """Return the text without calls, and the calls."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        described = [ChatCompletionToolsParam(**tool) for tool in tools]
        request = ChatCompletionRequest(messages=[], model="policy", tools=described)
        # A parser keeps the state of a stream, so each answer has one of its own.
        try:
            parsed = self._class(self._tokenizer, described).extract_tool_calls(text, request)
        except Exception:  # of a text that vLLM's parser is not made for
            return text, []
        if not parsed.tool_calls:
            return text, []
        return parsed.content or "", [(call.function.name, call.function.arguments) for call in parsed.tool_calls]

    def begun(self, text: str) -> int:
        """Return how many calls a text seems to have, whether or not they can be read."""
        marks = text.count(self._mark) if self._mark else 0
        return marks or int(self._is_bare and text.lstrip()[:1] in ("{", "["))


def tool_parser(name: str, tokenizer: Any) -> ToolParser | HarmonyCalls:
    """Return vLLM's parser ``name``, as in vLLM's --tool-call-parser, for a tokenizer of transformers.

    Raises:
        UnusableParser: there is none, or it is not made for this tokenizer.
    """
    from vllm.tool_parsers import ToolParserManager

    parser_class = _class_of(name, ToolParserManager.get_tool_parser, ToolParserManager.list_registered)
    if parser_class.__name__ == "GptOssToolParser":  # it refers to one that reads token ids
        return HarmonyCalls()
    return ToolParser(name, parser_class, tokenizer)


def _mark_of(parser: Any) -> tuple[str | None, bool]:
    """Return the text with which a call begins, and whether it may be missing before a call in JSON.

    vLLM's parsers have it under one of these names, or in a table of states.
    """
    engine = getattr(getattr(parser, "_parser_engine", None), "parser_engine_config", None)
    marks = [getattr(parser, name, None) for name in ("tool_call_start_token", "tool_calls_start_token")]
    marks.append(getattr(engine, "terminals", {}).get("TOOL_START"))
    for mark in marks:
        text = mark[0] if isinstance(mark, tuple) else mark
        if isinstance(text, str) and text:
            return text, False
    return getattr(parser, "bot_token", None), True


def reasoning_parser(name: str, tokenizer: Any) -> Callable[[str], tuple[str, str]]:
    """Return vLLM's parser ``name``: text of an answer -> (reasoning, what follows it).

    Raises:
        UnusableParser: there is none.
    """
    from vllm.reasoning import ReasoningParserManager

    parser_class = _class_of(name, ReasoningParserManager.get_reasoning_parser, ReasoningParserManager.list_registered)
    if parser_class.__name__ == "GptOssReasoningParser":  # it finds the end of reasoning alone
        return harmony_reasoning
    parser = parser_class(tokenizer)

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
