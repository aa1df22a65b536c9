"""JSON of others becomes a bounded value of finite numbers, or one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.errors import DataError
from rlhf_megatron.untrusted import MOST_LEVELS, is_within_levels, parse_json

FRAGMENTS = (*'{}[],:"\\', "0", "1e9999", "NaN", "-Infinity", "null", "é", "\x00", "9" * 5000)


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, (int, float)):
        yield value


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join) | st.text() | st.binary())
def test_any_text_is_a_finite_value_or_one_line(text: str | bytes) -> None:
    try:
        value = parse_json(text, "here", DataError)
    except DataError as error:
        assert str(error).startswith("here: ") and str(error).isprintable() and len(str(error)) < 500
    else:
        assert is_within_levels(value, MOST_LEVELS) and all(map(math.isfinite, numbers_in(value)))
