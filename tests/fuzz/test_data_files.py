"""Parquet files of any kind become rows, or one line that says what is wrong."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet
from hypothesis import given
from hypothesis import strategies as st

from data_rows import opened, row, table
from rlhf_megatron.data.prompts import LeftOut, Prompt
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.data.tokenizer_loading import load_tokenizer
from rlhf_megatron.errors import DataError
from tiny_tokenizer import write_bpe_tokenizer

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"use_dictionary": False, "compression": "none"},
    {"compression": "zstd", "row_group_size": 3},
    {"data_page_version": "2.0", "write_page_checksum": True},
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "a"]), inner),
    max_leaves=8,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.just("user") | st.text(), "content": st.text()}), max_size=3)


@functools.cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return load_tokenizer(write_bpe_tokenizer(Path(folder)))


@functools.cache
def content(option: int) -> bytes:
    stream = pyarrow.BufferOutputStream()
    rows = table(*[row(f"What is {number} + 1?") for number in range(10)])
    pyarrow.parquet.write_table(rows, stream, **OPTIONS[option])
    return bytes(stream.getvalue())


def check(path: Path) -> None:
    """Check that there are rows, or one line."""
    try:
        found = opened(tokenizer(), path)
    except DataError as error:
        assert str(error).startswith(str(path)) and str(error).isprintable() and len(str(error)) < 2000
    else:
        assert all(isinstance(item, (Prompt, LeftOut)) for item in found)


@given(
    st.integers(0, len(OPTIONS) - 1),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255), st.booleans()), max_size=6),
    st.integers(0, 10_000),
)
def test_a_damaged_file_is_read_or_told(option: int, changes: list[tuple[int, int, bool]], cut: int) -> None:
    damaged = bytearray(content(option))
    for place, value, from_end in changes:
        damaged[-(place % len(damaged)) if from_end else place % len(damaged)] = value
    if cut < len(damaged):
        del damaged[len(damaged) - cut :]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        path.write_bytes(damaged)
        check(path)


@given(st.fixed_dictionaries({"data_source": ANYTHING, "prompt": MESSAGES | ANYTHING, "reward_model": ANYTHING}))
def test_values_of_any_kind_are_read_or_told(values: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([values]), path)
        except (pyarrow.ArrowException, UnicodeEncodeError, OverflowError):
            return  # no file has such values
        check(path)
