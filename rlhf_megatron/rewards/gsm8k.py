"""GSM8K: the number behind the last ``####`` of a response. Pure and fast, so it runs in the rank's own process."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

MARKER = "####"

# A sign, dollars, then digits, in threes where commas part them; a dot needs digits behind it. No run of characters
# fits two parts of it, so that it stays linear in the text. What goes on as in 1e3, 1/2, 1.5.2, 1:30, 12abc, 3! and
# 1-10 is another number, or none. Digits are 0 to 9 alone.
_NUMBER = re.compile(r"([-+]?) ?\$? ?([-+]?)([0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_GOES_ON = re.compile(r"[\w/^*+!?:=<>~|\\(\[{_-]|[.,][0-9]|\.\.")
# Words behind a number that make it another one, or no answer.
_OTHER_NUMBER = re.compile(r"\b(?:or|not|hundred|thousand|million|billion|trillion|dozen)\b", re.IGNORECASE)
# More digits than any answer has; Decimal's equality would otherwise work through whatever a model repeats.
_LONGEST_NUMBER = 64


def extract_answer(text: str) -> Decimal | None:
    """Return the number behind the last ``####``, or None where that marker or a number right behind it is missing.

    "#### 1,234", "#### $18.00", "####-3." and "#### 18 dollars" are read; a number in an earlier ``####`` is not.
    """
    _, separator, tail = text.rpartition(MARKER)
    return parse_number(tail) if separator else None


def parse_number(text: str) -> Decimal | None:
    """Return the number that the text starts with (sign, dollar and thousands commas allowed), or None.

    It is the only number of its line: "3 or 4", "1 000" and "5 million" are none.
    """
    line = text.lstrip(" \t").partition("\n")[0].replace("−", "-")
    match = _NUMBER.match(line)
    if match is None or _GOES_ON.match(line, match.end()):
        return None
    rest = line[match.end() :]
    if any(map(str.isnumeric, rest)) or _OTHER_NUMBER.search(rest):
        return None
    if len(match.group(3)) > _LONGEST_NUMBER or (match.group(1) and match.group(2)):
        return None
    try:
        return Decimal(match.group(1) + match.group(2) + match.group(3).replace(",", ""))
    except InvalidOperation:
        return None


def score(solution: str, ground_truth: str) -> float:
    """Return 1.0 if the number behind the response's last ``####`` equals the ground truth, else 0.0.

    The format is GSM8K's own (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168); verl calls this rule "strict".

    Args:
        solution: the response.
        ground_truth: the number as text, or GSM8K's whole answer with its own ``#### N``.

    Raises:
        ValueError: the ground truth holds no number.
    """
    truth = extract_answer(ground_truth) if MARKER in ground_truth else parse_number(ground_truth)
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth[:80]!r} is not a number")
    return 1.0 if extract_answer(solution) == truth else 0.0
