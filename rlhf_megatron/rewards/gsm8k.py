"""GSM8K: the number behind the last `####` of a response. Pure and fast, so it runs in the rank's own process."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

MARKER = "####"

# A sign, dollars, then digits with commas; a dot needs digits behind it. No run of characters fits two parts
# of it, so that it stays linear in the text.
_NUMBER = re.compile(r"([-+]?) ?\$? ?([-+]?)(\d[\d,]*(?:\.\d+)?|\.\d+)")
# More digits than any answer has; Decimal's equality would otherwise work through whatever a model repeats.
_LONGEST_NUMBER = 64


def extract_answer(text: str) -> Decimal | None:
    """Return the number behind the last `####`, or None where that marker or a number right behind it is missing.

    "#### 1,234", "#### $18.00", "####-3." and "#### 18 dollars" are read; a number in an earlier `####` is not.
    """
    _, found, tail = text.rpartition(MARKER)
    return parse_number(tail) if found else None


def parse_number(text: str) -> Decimal | None:
    """Return the number that the text starts with (sign, dollar and thousands commas allowed), or None."""
    match = _NUMBER.match(text.lstrip(" \t"))
    if match is None or len(match.group(3)) > _LONGEST_NUMBER or (match.group(1) and match.group(2)):
        return None
    try:
        return Decimal(match.group(1) + match.group(2) + match.group(3).replace(",", ""))
    except InvalidOperation:
        return None


def score(solution: str, ground_truth: str) -> float:
    """Return 1.0 if the number behind the response's last `####` equals the ground truth, else 0.0.

    The format is GSM8K's own (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168); verl calls this rule "strict".

    Args:
        solution: the response.
        ground_truth: the number as text, or GSM8K's whole answer with its own `#### N`.

    Raises:
        ValueError: the ground truth holds no number.
    """
    truth = extract_answer(ground_truth) if MARKER in ground_truth else parse_number(ground_truth)
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth[:80]!r} is not a number")
    return 1.0 if extract_answer(solution) == truth else 0.0
