"""The chat completions API: request bodies to questions, answers to bodies and to the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.agents.protocol import (
    MOST_MESSAGES,
    Answer,
    Message,
    Question,
    Refusal,
    arguments_of,
    field,
    listed_tools,
    positive,
    role_of,
    stops_of,
    text_of,
)

# Asking for these and not getting them would change what a program does.
_UNSUPPORTED = ("logit_bias", "functions", "audio", "prediction")


def question_of(body: Any) -> Question:
    """Return what a request body asks. Sampling is the recipe's: temperature, top_p and seed are not read.

    Raises:
        Refusal: it is none, or asks for what is not supported.
    """
    messages = field(body, "messages", list, "body")
    if not 0 < len(messages) <= MOST_MESSAGES:
        raise Refusal(f"messages must have 1 to {MOST_MESSAGES} entries")
    if body.get("n") not in (None, 1):
        raise Refusal("n must be 1")
    for name in _UNSUPPORTED:
        if body.get(name):
            raise Refusal(f"{name} is not supported")
    check_form(body.get("response_format"))
    most = body.get("max_completion_tokens")
    return Question(
        [message_of(message, f"messages[{index}]") for index, message in enumerate(messages)],
        tools_of(body),
        positive(body.get("max_tokens") if most is None else most, "max_tokens"),
        stops_of(body.get("stop")),
    )


def check_form(form: Any) -> None:
    """Raise Refusal for a form of the answer that only constrained sampling would give."""
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in (None, "text"):
        raise Refusal(f"a response format of type {str(kind)[:40]} is not supported; only text")


def tools_of(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools for the chat template; None for none. Raises Refusal for a tool that is none."""
    tools = listed_tools(body)
    for index, tool in enumerate(tools):
        field(field(tool, "function", dict, f"tools[{index}]"), "name", str, f"tools[{index}].function")
    return [{"type": "function", "function": tool["function"]} for tool in tools] or None


def message_of(message: Any, where: str) -> Message:
    """Return a message in the chat template's form. Raises Refusal where it is none."""
    normalized: Message = {"role": role_of(message, where), "content": text_of(message.get("content"), where)}
    if message.get("tool_calls"):
        calls = field(message, "tool_calls", list, where)
        normalized["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    normalized |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    return normalized


def _call(call: Any, where: str) -> dict[str, Any]:
    function = field(call, "function", dict, where)
    name = field(function, "name", str, where)
    function_call = {"name": name, "arguments": arguments_of(function.get("arguments"), where)}
    return {"id": str(call.get("id", "")), "type": "function", "function": function_call}


def completion_of(answer: Answer, identity: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as a chat completion; ``token_ids`` beside the standard's fields are what was sampled."""
    choice = {
        "index": 0,
        "message": wire_message(answer.message),
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer) if body.get("logprobs") else None,
        "token_ids": answer.token_ids,
    }
    return _head(identity, "chat.completion", body) | {"choices": [choice], "usage": usage_of(answer)}


def chunks_of(answer: Answer, identity: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name, which is empty, and the data of a stream's events; an answer is whole before the first."""
    head, message = _head(identity, "chat.completion.chunk", body), wire_message(answer.message)
    calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", ()))]
    parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    parts += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    parts += [{"tool_calls": [call]} for call in calls]
    for delta in parts:
        yield (
            "",
            json.dumps(head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]}),
        )
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "token_ids": answer.token_ids}
    if body.get("logprobs"):
        last["logprobs"] = _logprobs(answer)
    yield "", json.dumps(head | {"choices": [last]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", json.dumps(head | {"choices": [], "usage": usage_of(answer)})
    yield "", "[DONE]"


def wire_message(message: Message) -> Message:
    """Return a message as clients read it: arguments of calls are text."""
    if "tool_calls" not in message:
        return dict(message)
    return message | {"tool_calls": [_wire_call(call) for call in message["tool_calls"]]}


def _wire_call(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call | {"function": {"name": call["function"]["name"], "arguments": text}}


def usage_of(answer: Answer) -> dict[str, int]:
    """Return the numbers of tokens."""
    prompt, sampled = answer.prompt_tokens, len(answer.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _head(identity: str, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of every object; the time is left at 0, so that a run repeats."""
    return {"id": f"chatcmpl-{identity}", "object": kind, "created": 0, "model": str(body.get("model", "policy"))}


def _logprobs(answer: Answer) -> dict[str, Any]:
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in pairs
    ]
    return {"content": content}
