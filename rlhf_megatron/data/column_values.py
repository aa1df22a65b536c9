"""The values of a row's columns: the meaning of each, checked where it is read.

Columns: data_source (text), prompt (list of {role, content}), ability (not read), reward_model ({style, ground_truth}),
extra_info (any struct, optional). Not here: finding and decoding rows (rows.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rlhf_megatron.data.parquet import MOST_MESSAGES, RowLocation
from rlhf_megatron.untrusted import shown

Message = dict[str, Any]

# Characters of a role or a data source.
MOST_NAME = 200
# Of a pair's margin, either way: scores of reward models are some units apart.
MOST_MARGIN = 1e6


def parse_messages(value: Any, location: RowLocation) -> list[Message]:
    """Return a row's prompt as messages with ``role`` and ``content``; fields that are null are left out.

    Parquet gives each tool call the arguments of all others as nulls, so these go at any depth.

    Raises:
        DataError: the prompt is empty, ends with an answer, or is no list of {role, content} with text in both.
    """
    messages = parse_turns(value, "prompt", location)
    if messages[-1]["role"] == "assistant":
        raise location.error("prompt", "the last message is the assistant's; its turn must come next, so take that out")
    if not any(message["content"].strip() for message in messages):
        raise location.error("prompt", "every message is empty; give a question, or remove the row")
    return messages


def parse_turns(value: Any, column: str, location: RowLocation) -> list[Message]:
    """Return the messages of any column, whoever has the last turn; see ``parse_messages``.

    A message that calls tools may lack content.
    """
    if value is None or (isinstance(value, (list, str)) and not value):
        raise location.error(column, "empty; give at least one message, or remove the row")
    if not isinstance(value, list):
        raise location.error(
            column,
            f"{type(value).__name__} instead of a list of {{role, content}}; wrap the text as one user message",
        )
    if len(value) > MOST_MESSAGES:
        raise location.error(column, f"has {len(value):,} messages; at most {MOST_MESSAGES:,} are read; take it out")
    return [_message(message, index, column, location) for index, message in enumerate(value)]


def _message(message: Any, index: int, column: str, location: RowLocation) -> Message:
    """Return a message as a template takes it; raises DataError."""
    if not isinstance(message, dict):
        raise location.error(column, f"message {index} is {type(message).__name__} instead of {{role, content}}")
    message = _without_nulls(message)
    if message.get("tool_calls"):
        message.setdefault("content", "")
    for field in ("role", "content"):
        if not isinstance(message.get(field), str):
            raise location.error(
                column,
                f"message {index} has {field} of type {type(message.get(field)).__name__} instead of text; "
                "write plain text messages",
            )
    role = message["role"]
    if not role.strip() or not role.isprintable() or len(role) > MOST_NAME:
        raise location.error(column, f"message {index} has the role {shown(repr(role))}; write user, system or another")
    return message


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def with_system_prompt(messages: list[Message], text: str | None) -> list[Message]:
    """Return the messages with ``text`` as the system's before them, where there is a text and they have none of their
    own."""
    if text is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": text}, *messages]


def parse_data_source(value: Any, location: RowLocation) -> str:
    """Return a row's data_source, the name by which its reward function is chosen.

    Raises:
        DataError: it is not text, empty, long, or holds control characters.
    """
    if not isinstance(value, str) or not value.strip():
        shown_value = shown(repr(value))
        raise location.error(
            "data_source", f"{shown_value} instead of a name such as openai/gsm8k; name the reward to use"
        )
    if not value.isprintable() or len(value) > MOST_NAME:  # it names metrics
        raise location.error(
            "data_source", f"{shown(value)!r}: more than {MOST_NAME} characters, or one of control; shorten the name"
        )
    return value


def parse_ground_truth(value: Any, location: RowLocation) -> str:
    """Return reward_model.ground_truth as text; lists, structs and numbers become JSON text.

    Raises:
        DataError: reward_model is no struct, or has no ground_truth.
    """
    if not isinstance(value, dict):
        raise location.error("reward_model", f"{type(value).__name__} instead of a struct {{style, ground_truth}}")
    truth = value.get("ground_truth")
    if truth is None:
        raise location.error("reward_model", "ground_truth is missing; write the right answer there, or remove the row")
    if isinstance(truth, float) and not math.isfinite(truth):  # as pandas writes what is missing
        raise location.error(
            "reward_model", f"ground_truth is {truth}; write the right answer there, or remove the row"
        )
    return truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False, default=str)


def parse_extra_info(value: Any, location: RowLocation) -> dict[str, Any]:
    """Return extra_info as a dictionary; null becomes an empty one.

    Raises:
        DataError: it is neither a struct nor a map.
    """
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        pairs, value = value, {}  # pyarrow gives a map column as a list of pairs
        for key, item in pairs:
            if not isinstance(key, str):
                raise location.error("extra_info", "a map whose keys are no text; use a struct or leave it out")
            if key in value:
                raise location.error("extra_info", f"a map with the key {shown(repr(key))} twice; leave one out")
            value[key] = item
    if not isinstance(value, dict):
        raise location.error("extra_info", f"{type(value).__name__} instead of a struct; use a struct or leave it out")
    return value


def parse_margin(value: Any, location: RowLocation) -> float:
    """Return a pair's margin: by how much the chosen response is to be ahead; null or no column is 0.

    Raises:
        DataError: it is no finite number.
    """
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise location.error("margin", f"{shown(repr(value))} instead of a finite number; write a number or null")
    if abs(value) > MOST_MARGIN:
        raise location.error("margin", f"{value:g} is beyond {MOST_MARGIN:g}; write a smaller number or null")
    return float(value)


def parse_response(row: dict[str, Any], column: str, location: RowLocation) -> str:
    """Return the target text of a supervised row.

    Args:
        column: a top-level column, or a path into structs such as "extra_info.answer" or "reward_model.ground_truth".

    Raises:
        DataError: there is no such value, or it is not text, or it is empty.
    """
    value = column_value(row, column)
    if not isinstance(value, str) or not value.strip():
        raise location.error(
            column,
            f"{shown(repr(value))} instead of a response text; write one (for sft, data.response_column names the "
            "column that holds the text)",
        )
    return value


def column_value(row: dict[str, Any], column: str) -> Any:
    """Return a row's value of a column, or of a path into structs; None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def row_of_users(
    messages: Sequence[Message], data_source: str, ground_truth: str | None, extra_info: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Return a row as a user's environment or agent gets it, with the seed of its draws."""
    return {
        "prompt": list(messages),
        "data_source": data_source,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
        "seed": seed,
    }
