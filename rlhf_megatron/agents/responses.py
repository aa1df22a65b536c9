"""The responses API: request bodies to questions, answers to responses and to the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_megatron.agents.chat_completions import check_form, wire_message
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
    text_of,
)

_UNSUPPORTED = ("conversation", "background", "prompt", "truncation")


def question_of(body: Any, earlier: Sequence[Message] = ()) -> Question:
    """Return what a request body asks, behind the messages of an ``earlier`` response. Sampling is the recipe's.

    Raises:
        Refusal: it is none, or asks for what is not supported.
    """
    asked = body.get("input") if isinstance(body, dict) else None
    if isinstance(asked, str):
        asked = [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not 0 < len(asked) <= MOST_MESSAGES:
        raise Refusal(f"input must be a text or a list of 1 to {MOST_MESSAGES} items")
    for name in _UNSUPPORTED:
        if body.get(name) not in (None, False, "disabled"):
            raise Refusal(f"{name} is not supported")
    check_form((body.get("text") or {}).get("format"))
    messages = list(earlier)
    if body.get("instructions"):
        # Those of the response before do not carry over.
        messages = [message for message in messages if message["role"] != "system"]
        messages.insert(0, {"role": "system", "content": field(body, "instructions", str, "body")})
    for index, item in enumerate(asked):
        _add(messages, item, f"input[{index}]")
    return Question(messages, _tools_of(body), positive(body.get("max_output_tokens"), "max_output_tokens"))


def _add(messages: list[Message], item: Any, where: str) -> None:
    """Append an item; what the assistant says and calls in a row is one message."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        messages.append({"role": role_of(item, where), "content": text_of(item.get("content"), where)})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        arguments = arguments_of(field(item, "arguments", str, where), where)
        function = {"name": field(item, "name", str, where), "arguments": arguments}
        call = {"id": field(item, "call_id", str, where), "type": "function", "function": function}
        messages[-1] = messages[-1] | {"tool_calls": [*messages[-1].get("tool_calls", ()), call]}
    elif kind == "function_call_output":
        output = text_of(item.get("output"), where)
        messages.append({"role": "tool", "content": output, "tool_call_id": field(item, "call_id", str, where)})
    elif kind != "reasoning":
        raise Refusal(f"{where} is of type {str(kind)[:40]}, which is not supported")


def _tools_of(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = listed_tools(body)
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise Refusal(f"tools[{index}]: only functions are supported")
        field(tool, "name", str, f"tools[{index}]")
    described = ("name", "description", "parameters")
    return [
        {"type": "function", "function": {name: tool[name] for name in described if tool.get(name) is not None}}
        for tool in tools
    ] or None


def response_of(answer: Answer, identity: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as a response; ``token_ids`` beside the standard's fields are what was sampled."""
    is_cut = answer.finish_reason == "length"
    prompt, sampled = answer.prompt_tokens, len(answer.token_ids)
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": 0,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": {},
        "model": str(body.get("model", "policy")),
        "output": _output(answer, identity),
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
        "token_ids": answer.token_ids,
    }


def _output(answer: Answer, identity: str) -> list[dict[str, Any]]:
    message, items = wire_message(answer.message), []
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{identity}", "summary": summary})
    calls = message.get("tool_calls", ())
    if message.get("content") or not calls:
        part: dict[str, Any] = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
        head = {"type": "message", "id": f"msg_{identity}", "role": "assistant", "status": status}
        items.append(head | {"content": [part]})
    for index, call in enumerate(calls):
        of_call = {"id": f"fc_{identity}_{index}", "call_id": call["id"], "status": status}
        items.append({"type": "function_call", **of_call, **call["function"]})
    return items


def events_of(answer: Answer, identity: str, body: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and data of a stream's events; an answer is whole before the first."""
    whole = response_of(answer, identity, body)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")
    ]
    for index, item in enumerate(whole["output"]):
        events += _events_of_item(item, {"output_index": index, "item_id": item["id"]})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        yield event["type"], json.dumps(event | {"sequence_number": number})


def _events_of_item(item: dict[str, Any], at: dict[str, Any]) -> list[dict[str, Any]]:
    index = {"output_index": at["output_index"]}
    inside: list[dict[str, Any]] = []
    empty = item
    if item["type"] == "message":
        (part,) = item["content"]
        empty, at = item | {"content": [], "status": "in_progress"}, at | {"content_index": 0}
        inside = [
            {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
            {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
            {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part},
        ]
    elif item["type"] == "function_call":
        empty, arguments = item | {"arguments": "", "status": "in_progress"}, item["arguments"]
        inside = [
            {"type": "response.function_call_arguments.delta", **at, "delta": arguments},
            {"type": "response.function_call_arguments.done", **at, "name": item["name"], "arguments": arguments},
        ]
    return [
        {"type": "response.output_item.added", **index, "item": empty},
        *inside,
        {"type": "response.output_item.done", **index, "item": item},
    ]
