"""Rewards for the form of a response, whatever it says: a pattern that it must match, and its length."""

from __future__ import annotations

import re
from functools import lru_cache


def format_score(solution: str, pattern: str) -> float:
    """Return 1.0 if the whole response, without white space at its ends, matches the regular expression, else 0.0.

    ``.`` matches line breaks too. Patterns such as (a+)+b take for ever on some texts, so it is called in a worker
    process that is killed at a time limit.
    """
    return 1.0 if _compiled(pattern).fullmatch(solution.strip()) else 0.0


def length_score(tokens: int, low: int, high: int) -> float:
    """Return 0.0 for a response of at most ``low`` tokens, 1.0 from ``high`` tokens on, and a straight line between."""
    return min(max((tokens - low) / (high - low), 0.0), 1.0)


@lru_cache(maxsize=16)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
