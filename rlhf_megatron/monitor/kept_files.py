"""Reading of rows that a run keeps, rollouts/ and samples/: bounded, and of damaged files what can be told.

Other programs may have written these files: a column counts if it has the type that is expected of it.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.kept_rows import TURNS
from rlhf_megatron.untrusted import opened, reason_of

Kind = Literal["training", "evaluation"]
FOLDERS: dict[Kind, str] = {"training": "rollouts", "evaluation": "samples"}
# Of one file: far more than is kept on purpose.
MOST_ROWS, MOST_BYTES = 4096, 256 * 2**20
MOST_FILES = 10_000
_ROWS_AT_ONCE = 16
_STEP_FILE = re.compile(r"step-([0-9]{1,15})\.parquet")
_TEXTS = ("prompt", "response", "data_source", "ground_truth")
_NUMBERS = ("reward", "score", "advantage", "sampled_tokens", "prompt_tokens", "weight_version", "group_id", "row_id")
_MARKS = ("truncated", "unscored")
_OF_TOKENS = ("sampled", "token_texts", "rollout_logprobs", "trainer_logprobs", "logprob_differences", "advantages")
_PART = "reward_"


@dataclass(frozen=True)
class Token:
    """One token of a response; numbers are None where nobody computed them or somebody else wrote the token."""

    text: str
    sampled: bool
    rollout: float | None
    trainer: float | None
    difference: float | None
    advantage: float | None


@dataclass(frozen=True)
class KeptRow:
    """One response with what is known of it; ``wrong`` is None where the reward says nothing of right and wrong."""

    kind: Kind
    step: int
    number: int
    prompt_key: str
    prompt: str
    response: str
    data_source: str
    ground_truth: str
    reward: float | None
    parts: dict[str, float]
    advantage: float | None
    length: int
    truncated: bool
    wrong: bool | None
    mismatch: float | None
    tokens: list[Token]
    turn_rewards: list[float | None]  # of each turn of the model's


def key_of(prompt: str) -> str:
    """Return the name of a prompt in an address: the same for the same text, in any run."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def kept_steps(folder: Path, kind: Kind) -> list[int]:
    """Return the steps that rows are kept of, ascending; at most the newest MOST_FILES."""
    try:
        names = os.listdir(folder / FOLDERS[kind])
    except OSError:
        return []
    return sorted(int(match.group(1)) for name in names if (match := _STEP_FILE.fullmatch(name)))[-MOST_FILES:]


def read_rows(
    folder: Path, kind: Kind, step: int, correct_from: float | None, prompt_key: str | None = None
) -> list[KeptRow]:
    """Return a step's rows, of one prompt alone where its key is given.

    Args:
        correct_from: lowest score of a right response; None where nothing is right or wrong.

    Raises:
        MonitorError: there is no such file, it is no parquet, or holds more than is read.
    """
    path = folder / FOLDERS[kind] / f"step-{step}.parquet"
    rows: list[KeptRow] = []
    try:
        with opened(path, MonitorError) as file:
            for number, values in enumerate(_values(pq.ParquetFile(file), path)):
                if prompt_key is None or key_of(_text(values, "prompt")) == prompt_key:
                    rows.append(_row(values, kind, step, number, correct_from))
    except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
        if isinstance(error, MonitorError):
            raise
        raise MonitorError(f"{path}: is no parquet ({reason_of(error)})") from error
    return rows


def _values(file: pq.ParquetFile, path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the known columns of each row, decoded a few rows at a time so that a small file cannot fill the memory."""
    known = [field.name for field in file.schema_arrow if _is_known(field)]
    claimed = sum(file.metadata.row_group(index).total_byte_size for index in range(file.num_row_groups))
    if file.metadata.num_rows > MOST_ROWS or claimed > MOST_BYTES:
        raise MonitorError(f"{path}: has {file.metadata.num_rows:,} rows and {claimed:,} bytes; more than is read")
    decoded = 0
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=known):
        decoded += batch.nbytes
        if decoded > MOST_BYTES:
            raise MonitorError(f"{path}: decodes to more than {MOST_BYTES:,} bytes; it is not read")
        yield from batch.to_pylist()


def _is_known(field: pa.Field) -> bool:
    kind, name = field.type, field.name
    if name in _TEXTS:
        return pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if name in _NUMBERS or name.startswith(_PART):
        return pa.types.is_floating(kind) or pa.types.is_integer(kind)
    if name in _MARKS:
        return pa.types.is_boolean(kind)
    if name == "turns":
        return bool(field.type == TURNS)
    if name in _OF_TOKENS and pa.types.is_list(kind):
        inner = kind.value_type
        wanted = {"sampled": pa.types.is_boolean, "token_texts": pa.types.is_string}.get(name, pa.types.is_floating)
        return bool(wanted(inner))
    return False


def _row(values: Mapping[str, Any], kind: Kind, step: int, number: int, correct_from: float | None) -> KeptRow:
    reward = _number(values.get("reward" if kind == "training" else "score"))
    parts = {
        name.removeprefix(_PART): value
        for name in values
        if name.startswith(_PART) and (value := _number(values[name])) is not None
    }
    # The first part is the one that says right or wrong (evaluation.correct_from).
    judged = next(iter(parts.values()), reward)
    wrong = None if correct_from is None or judged is None or values.get("unscored") else judged < correct_from
    tokens = _tokens(values)
    gaps = [abs(token.difference) for token in tokens if token.sampled and token.difference is not None]
    response, prompt = _text(values, "response"), _text(values, "prompt")
    counted = values.get("sampled_tokens")
    return KeptRow(
        kind,
        step,
        number,
        key_of(prompt),
        prompt,
        response,
        _text(values, "data_source"),
        _text(values, "ground_truth"),
        reward,
        parts,
        _number(values.get("advantage")),
        counted if isinstance(counted, int) else len(response),
        bool(values.get("truncated")),
        wrong,
        math.fsum(gaps) / len(gaps) if gaps else None,
        tokens,
        [_number(turn.get("reward")) for turn in values.get("turns") or () if turn and turn.get("sampled")],
    )


def _tokens(values: Mapping[str, Any]) -> list[Token]:
    """Return the response's tokens: those from the first sampled one on. Empty where lists are missing or differ in
    length."""
    sampled, texts = values.get("sampled"), values.get("token_texts")
    if not sampled or not texts or len(sampled) != len(texts) or True not in sampled:
        return []
    begin = sampled.index(True)
    columns: list[Sequence[float | None]] = []
    for name in ("rollout_logprobs", "trainer_logprobs", "logprob_differences", "advantages"):
        column = values.get(name)
        columns.append(column if column and len(column) == len(sampled) else [None] * len(sampled))
    return [
        Token(texts[at] or "", True, *(_number(column[at]) for column in columns))
        if sampled[at]
        else Token(texts[at] or "", False, None, None, None, None)
        for at in range(begin, len(sampled))
    ]


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
