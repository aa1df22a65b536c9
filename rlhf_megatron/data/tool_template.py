"""Chat templates behind a turn that calls tools: the tokens of results, without rendering again what was sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_megatron.data.tokenizer import TURN_PROBE, Message, Tokenizer
from rlhf_megatron.errors import DataError


def encode_results(tokenizer: Tokenizer, turn: Message, end: int, messages: Sequence[Message]) -> list[int]:
    """Return what the chat template puts behind a turn whose calls ``messages`` answer: up to and with the header of
    the assistant's next turn. The token ``end``, with which the turn was sampled to end, is not part of that.

    Raises:
        DataError: the template refuses the messages, or ends such a turn otherwise.
    """
    end_text = tokenizer.decode([end], skip_special_tokens=False)
    begin, found, behind = _behind_calls(tokenizer, turn, messages).partition(end_text)
    if not found or any(message["content"] and message["content"] in begin for message in messages):
        raise DataError(f"the chat template does not put {end_text!r} between a turn that calls tools and a result")
    return tokenizer.encode(behind)


def call_end_token(tokenizer: Tokenizer, name: str) -> int | None:
    """Return the stop token that the chat template puts behind a turn that calls the tool ``name``, if there is one."""
    call = {"id": "call_0", "type": "function", "function": {"name": name, "arguments": {}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "resultprobe", "tool_call_id": "call_0", "name": name}
    try:
        behind = _behind_calls(tokenizer, turn, [result])
    except DataError:
        return None
    before = tokenizer.encode(behind.partition("resultprobe")[0])
    return next((token for token in before if token in tokenizer.stop_token_ids), None)


def _behind_calls(tokenizer: Tokenizer, turn: Message, messages: Sequence[Message]) -> str:
    """Return the chat template's text behind the arguments of a turn's last call, of which a probe takes the place."""
    refusal = DataError("the chat template leaves out the calls of a turn")
    for form in _forms(turn):
        begin = [{"role": "user", "content": "x"}, form]
        try:
            probes = tokenizer.render_chat(begin, add_generation_prompt=False).count(TURN_PROBE)
            parts = tokenizer.render_chat([*begin, *messages]).split(TURN_PROBE)
        except DataError as error:
            refusal = error
            continue
        if probes:
            return TURN_PROBE.join(parts[probes:])
    raise refusal


def _forms(turn: Message) -> Iterator[Message]:
    """Yield a turn's calls as templates want them: objects as arguments, or text and no content beside (DeepSeek's);
    all of them, or the last, where a template allows one in a turn (gpt-oss's, Llama's)."""
    calls = list(turn["tool_calls"])
    calls[-1] = _with_arguments(calls[-1], {TURN_PROBE: TURN_PROBE})
    for shown in (calls, calls[-1:]):
        yield {**turn, "tool_calls": shown}
        texts = [_with_arguments(call, json.dumps(call["function"]["arguments"])) for call in shown]
        yield {**turn, "content": None, "tool_calls": texts}


def _with_arguments(call: Message, arguments: Any) -> Message:
    return {**call, "function": {**call["function"], "arguments": arguments}}
