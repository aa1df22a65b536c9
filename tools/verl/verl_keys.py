"""The table of verl's keys (verl_keys.tsv): what becomes of each, and the values that need no line.

Not here: what mapped keys become (verl_sections.py, verl_roles.py).
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FATES = ("mapped", "differs", "refused", "nothing")
_NO_VALUE: tuple[Any, ...] = (None, "", [], {})


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    fate: str
    pattern: str
    accepted: tuple[str, ...]
    reason: str

    @functools.cached_property
    def expression(self) -> re.Pattern[str]:
        """The pattern of keys, where ``*`` is any text and ``{a,b}`` is either."""
        return re.compile("|".join(re.escape(each).replace(r"\*", ".*") for each in alternatives(self.pattern)))

    def accepts(self, value: Any) -> bool:
        """Return True for a value that needs no line."""
        if any(value == none and type(value) is type(none) for none in _NO_VALUE):
            return "null" in self.accepted
        return any(_same(value, text) for text in self.accepted)


def alternatives(pattern: str) -> list[str]:
    """Return the patterns that the braces of one stand for: ``a.{b,c}`` is ``a.b`` and ``a.c``."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


@functools.cache
def table() -> tuple[Row, ...]:
    """Return the rows of verl_keys.tsv, in its order."""
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    fields = [line.split("\t") for line in lines if line and not line.startswith("#")]
    padded = ([*row, "", ""][:4] for row in fields)
    return tuple(Row(fate, keys, tuple(filter(None, accepted.split(","))), why) for fate, keys, accepted, why in padded)


def row_of(key: str) -> Row | None:
    """Return the first row that fits a key; None where it is not known."""
    return next((row for row in table() if row.expression.fullmatch(key)), None)


@functools.cache
def sections() -> frozenset[str]:
    """Return the sections that keys of the table are in, such as trainer."""
    keys = (key.split("*")[0] for row in table() for key in alternatives(row.pattern))
    return frozenset(
        ".".join(parts[:count]) for key in keys for parts in [key.split(".")] for count in range(1, len(parts))
    )


def _same(value: Any, text: str) -> bool:
    """Return True where a value is the one that a text of the table means."""
    if isinstance(value, bool):
        return str(value).lower() == text.lower()
    if isinstance(value, int | float):
        return re.fullmatch(r"-?\d+(\.\d+)?", text) is not None and float(text) == value
    return str(value).lower() == text.lower()
