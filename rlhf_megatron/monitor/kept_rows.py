"""Tables of training rows for people and tools: rollouts/step-N.parquet.

Three tables, of different ranks, become one: the rows where their tokens are held, the outputs where the actor computed
them, and what is known of the prompts and scores where they were scored.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

# Writes ids as text, with control tokens.
Decode = Callable[[Sequence[int]], str]

NUMBERS = ("row_id", "group_id", "weight_version")
_FLOATS = pa.list_(pa.float32())
HELD = pa.schema(
    {
        **dict.fromkeys((*NUMBERS, "digest"), pa.int64()),
        "reward": pa.float32(),
        "truncated": pa.bool_(),
        "tokens": pa.list_(pa.int32()),
        "sampled": pa.list_(pa.bool_()),
        "rollout_logprobs": _FLOATS,
        "turn_rewards": _FLOATS,
    }
)
OUTPUTS = pa.schema({"row_id": pa.int64(), "trainer_logprobs": _FLOATS, "advantages": _FLOATS})
TURNS = pa.list_(pa.struct({"sampled": pa.bool_(), "text": pa.string(), "reward": pa.float32()}))


def notes_schema(part_names: Sequence[str]) -> pa.Schema:
    """Return the columns of the table of prompts and scores, ``part_names`` being those of the reward."""
    texts = dict.fromkeys(("data_source", "ground_truth"), pa.string())
    parts = {f"reward_{name}": pa.float32() for name in part_names}
    return pa.schema({"digest": pa.int64(), **texts, **parts})


def digest_of(token_ids: Sequence[int]) -> int:
    """Return a number by which ranks name a row that each has in its own form; equal rows have one."""
    content = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def kept_table(held: pa.Table, outputs: pa.Table, notes: pa.Table, step: int, decode: Decode) -> pa.Table:
    """Return one row for each of ``held``, in the order of their ids, with what the other tables know of it, else null.

    ``response`` is all that follows the prompt; ``turns`` has it in pieces, by who wrote them, with the reward that an
    environment has given for each.
    ``logprob_differences`` are the trainer's less the rollout's. ``advantage`` is the mean over sampled tokens.
    ``token_texts`` are for eyes: a token's text as it stands behind others, with its blank; a part of a character is �.
    """
    piece = functools.cache(lambda token: decode([token, token])[len(decode([token])) :])
    of_row = {row["row_id"]: row for row in outputs.to_pylist()}
    of_digest = {row.pop("digest"): row for row in notes.to_pylist()}
    rows = [
        _kept(row, of_row.get(row["row_id"], {}), of_digest.get(row["digest"], {}), step, decode)
        | {"token_texts": [piece(token) for token in row["tokens"]]}
        for row in held.sort_by("row_id").to_pylist()
    ]
    return pa.Table.from_pylist(rows, schema=_kept_schema(notes.schema))


def columns_for_people(table: pa.Table) -> dict[str, list[Any]]:
    """Return the columns of a ``kept_table`` with one text or number for each row, without lists of tokens; of several
    turns their number, and their rewards in one text."""
    shown = [field.name for field in table.schema if not pa.types.is_list(field.type)]
    columns = {name: table[name].to_pylist() for name in shown}
    turns = table["turns"].to_pylist() if "turns" in table.column_names else []
    own = [[turn["reward"] for turn in of_row if turn["sampled"]] for of_row in turns]
    if all(len(rewards) < 2 for rewards in own):
        return columns
    texts = [", ".join("-" if each is None else f"{each:g}" for each in rewards) for rewards in own]
    return columns | {"model_turns": [len(rewards) for rewards in own], "turn_rewards": texts}


def _kept(
    held: Mapping[str, Any], outputs: Mapping[str, Any], notes: Mapping[str, Any], step: int, decode: Decode
) -> dict[str, Any]:
    """Return one row of ``kept_table``."""
    tokens, sampled = held["tokens"], held["sampled"]
    begin = sampled.index(True) if True in sampled else len(tokens)
    rewards = held["turn_rewards"]
    turns = [
        {
            "sampled": sampled[first],
            "text": decode(tokens[first:last]),
            "reward": rewards[last - 1] if rewards and sampled[first] else None,
        }
        for first, last in _runs(sampled[begin:], begin)
    ]
    logprobs, advantages = outputs.get("trainer_logprobs"), outputs.get("advantages")
    differences = None
    if logprobs is not None:
        differences = [mine - its for mine, its in zip(logprobs, held["rollout_logprobs"], strict=True)]
    of_sampled = [value for value, mark in zip(advantages or (), sampled, strict=False) if mark]
    return {
        **{name: value for name, value in held.items() if name not in ("digest", "turn_rewards")},
        **notes,
        "step": step,
        "prompt": decode(tokens[:begin]),
        "response": "".join(turn["text"] for turn in turns),
        "turns": turns,
        "prompt_tokens": begin,
        "sampled_tokens": sum(sampled),
        "trainer_logprobs": logprobs,
        "logprob_differences": differences,
        "advantages": advantages,
        "advantage": math.fsum(of_sampled) / len(of_sampled) if of_sampled else None,
    }


def _runs(marks: Sequence[bool], offset: int) -> list[tuple[int, int]]:
    """Return (first, beyond the last) of each run of equal marks, counted from ``offset``."""
    edges = [0, *(position for position in range(1, len(marks)) if marks[position] != marks[position - 1]), len(marks)]
    return [(offset + first, offset + last) for first, last in itertools.pairwise(edges) if first < last]


def _kept_schema(notes: pa.Schema) -> pa.Schema:
    texts = [field for field in notes if field.name != "digest"]
    lists = {"trainer_logprobs": _FLOATS, "logprob_differences": _FLOATS, "advantages": _FLOATS}
    counts = dict.fromkeys(("prompt_tokens", "sampled_tokens"), pa.int32())
    return pa.schema(
        [
            pa.field("step", pa.int64()),
            *(field for field in HELD if field.name in NUMBERS),
            *texts,
            *(pa.field(name, pa.string()) for name in ("prompt", "response")),
            pa.field("turns", TURNS),
            *(HELD.field(name) for name in ("reward", "truncated")),
            pa.field("advantage", pa.float32()),
            *(pa.field(name, kind) for name, kind in counts.items()),
            HELD.field("tokens"),
            pa.field("token_texts", pa.list_(pa.string())),
            *(HELD.field(name) for name in ("sampled", "rollout_logprobs")),
            *(pa.field(name, kind) for name, kind in lists.items()),
        ]
    )
