"""Right responses to sums, some worked out step by step or by a tool: what the demo's model first learns from."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rlhf_megatron.data.column_values import parse_extra_info
from rlhf_megatron.data.rows import ParquetRows
from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import parse_json


def demonstration_rows(file: Path, worked_fraction: float, seed: int, tool: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a chain_sum file with a response each, all of them right.

    Args:
        file: parquet file of reasoning-gym's chain_sum.
        worked_fraction: of the rows are answered step by step, the others at once.
        seed: chooses these rows.
        tool: they are given to a tool instead, in a turn of their own.

    Raises:
        DataError: the file is not one of chain_sum.
    """
    if not 0.0 <= worked_fraction <= 1.0:
        raise DataError(f"--worked: {worked_fraction} is not a fraction between 0 and 1")
    draw = random.Random(seed)
    source = ParquetRows([file], ["data_source", "prompt", "reward_model"], ["ability", "extra_info"])
    rows: list[dict[str, Any]] = []
    for first, part in source.scan(["data_source", "prompt", "reward_model", "ability", "extra_info"]):
        for offset, row in enumerate(part):
            location = source.location(first + offset)
            info = parse_extra_info(row.get("extra_info"), location)
            try:
                entry = parse_json(info["entry"], "entry", DataError)
                expression = entry["metadata"]["expression"]
                total = chain_total(expression)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise location.error("extra_info", "no expression of chain_sum; make the file of that task") from error
            worked = draw.random() < worked_fraction
            working = tool_response if tool else worked_response
            rows.append({**row, "response": working(expression) if worked else str(total)})
    return rows


def chain_total(expression: str) -> int:
    """Return the value of "a + b - c ...": whole numbers with + and - between."""
    first, *rest = expression.split()
    total = int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        total += int(number) if sign == "+" else -int(number)
    return total


def tool_response(expression: str) -> str:
    """Return two turns, with a tool's between them: a chain that ends with "=" is a call.

    They are joined in the form of the chat template of ``tools/make_tiny_model.py``.
    """
    total = chain_total(expression)
    return f"{expression} =<|im_end|>\n<|im_start|>tool\n{total}<|im_end|>\n<|im_start|>assistant\n{total}"


def worked_response(expression: str) -> str:
    """Return the chain worked out from left to right: "<think>4 - 1 = 3; 3 + 7 = 10</think>10"."""
    first, *rest = expression.split()
    total, steps = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        step = f"{total} {sign} {number}"
        total = chain_total(step)
        steps.append(f"{step} = {total}")
    return f"<think>{'; '.join(steps)}</think>{total}"
