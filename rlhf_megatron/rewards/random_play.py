"""Conversations in which an environment is played by random moves: the form of a move, for a model to learn first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from rlhf_megatron.data.column_values import parse_extra_info, parse_messages, row_of_users
from rlhf_megatron.data.prepared_rows import CONSOLE
from rlhf_megatron.data.rows import ParquetRows
from rlhf_megatron.errors import DataError
from rlhf_megatron.rewards import user_environment
from rlhf_megatron.rewards.user_function import FunctionFailure, FunctionUnusable

SECONDS_PER_CALL = 60
COLUMNS = ("data_source", "prompt", "reward_model")


def played_rows(file: Path, environment: str, moves: Sequence[str], seed: int) -> list[dict[str, Any]]:
    """Return a row with ``messages`` for each episode of a file, played to its end, or until no move is left.

    Args:
        file: parquet file of ``episodes``.
        environment: ``path.py:Class``, as rollout.multi_turn.environment names it.
        moves: what to say, in any order and none twice.
        seed: of the order.

    Raises:
        DataError: the file has no episodes, or the environment fails.
    """
    draw, source, rows = random.Random(seed), ParquetRows([file], COLUMNS, ["extra_info"]), list[dict[str, Any]]()
    for first, part in source.scan([*COLUMNS, "extra_info"]):
        shown = track(part, "episodes", console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal)
        for offset, row in enumerate(shown):
            location = source.location(first + offset)
            information = parse_extra_info(row.get("extra_info"), location)
            messages = parse_messages(row["prompt"], location)
            truth = (row["reward_model"] or {}).get("ground_truth")
            episode = row_of_users(messages, row["data_source"], truth, information, information.get("seed", seed))
            try:
                turns = played(environment, episode, draw.sample(moves, len(moves)))
            except (FunctionFailure, FunctionUnusable, user_environment.TimedOut) as error:
                raise DataError(f"{environment}: {error}") from error
            rows.append({"data_source": row["data_source"], "messages": [*map(dict, messages), *turns]})
    return rows


def played(environment: str, row: dict[str, Any], moves: Sequence[str]) -> list[dict[str, str]]:
    """Return the messages of one episode, from its first observation to the move that ends it."""
    job = {"environment": environment, "row": row, "timeout_seconds": SECONDS_PER_CALL, "last": False}
    try:
        messages = list(user_environment.call(job | {"call": user_environment.RESET}).messages)
        for move in moves:
            reply = user_environment.call(job | {"call": user_environment.STEP, "action": move})
            messages.append({"role": "assistant", "content": move})
            if reply.done:
                break
            messages += reply.messages
    finally:
        user_environment.close_left(SECONDS_PER_CALL)
    while messages and messages[-1]["role"] != "assistant":  # an answer that nothing follows
        messages.pop()
    return messages
