r"""Mathematics: the last \boxed{...} (or the last "Answer:" line) of a response against the ground truth; DAPO's rule.

Equal text is settled at once; the rest is compared by math-verify (SymPy), which hostile text such as 9^9^9^9 can hang:
`verify` is therefore only called in a worker process (worker.py) that is killed at a time limit.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

# Longer answers are compared as text only: SymPy's parser is far slower than linear.
LONGEST_PARSED = 1000

_ANSWER_LINE = re.compile(r"(?i:\banswer)(?:[ ]is)?[ \t]*:([^\n]+)")
_DROPPED = ("\\left", "\\right", "\\!", "$", "^\\circ", "^{\\circ}")
_SPACES = re.compile(r"(?:\\[,; ]|\s)+")
# Between digits a space says something, unless it parts thousands: "1 1/2" is not 11/2, and "3 4" is not 34.
_IDLE_SPACE = re.compile(r"(?<!\d) | (?!\d)| (?=\d{3}(?!\d))")
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} whose braces close, or None; linear in the text."""
    end = len(text)
    while True:
        start = text.rfind("\\boxed{", 0, end)
        if start < 0:
            return None
        opened = text.index("{", start)
        depth = 0
        for position in range(opened, end):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[opened + 1 : position].strip()
        end = start  # never closed: look at the one before, within the text before this one


def extract_answer(text: str) -> str | None:
    r"""Return a response's final answer: its last \boxed{}, else what stands behind its last "Answer:" on that line."""
    boxed = last_boxed(text)
    return answer_line(text) if boxed is None else boxed


def answer_line(text: str) -> str | None:
    """Return what stands behind the last "Answer:" of a text on that line, without asterisks around it, or None."""
    lines = _ANSWER_LINE.findall(text)
    return lines[-1].strip().strip("*").strip() if lines else None


def dapo_answer(text: str) -> str | None:
    r"""Return the answer that DAPO's prompt asks for, the last line "Answer: ...", in a form to be compared, or None.

    Dollars, a box, \text{} and thousands commas go; a whole number loses leading zeros, as in AIME's 042.
    """
    line = answer_line(text)
    return None if not line else _dapo_form(line)


def dapo_score(solution: str, ground_truth: str) -> float:
    """Return 1.0 if the last "Answer:" line equals the ground truth as text or as a whole number, else 0.0.

    The rule for DAPO's data (arXiv 2503.14476), whose answers are all integers; no computer algebra. The paper pays 1
    and -1: that is twice this and a shift, which advantages relative to a group do not see.
    """
    answer = dapo_answer(solution)
    return 1.0 if answer and answer == _dapo_form(ground_truth) else 0.0


def _dapo_form(answer: str) -> str:
    form = normalize(_bare_truth(answer))
    digits = re.fullmatch(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?", form)
    if digits is None or len(form) > LONGEST_PARSED:
        return form
    sign = "-" if digits.group(1) == "-" else ""
    number = digits.group(2).replace(",", "").lstrip("0")
    return sign + number if number else "0"


def normalize(answer: str) -> str:
    r"""Return an answer without what carries no meaning in LaTeX: spaces, $, \left, \text{}, a final dot."""
    answer = plain_text(answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    for dropped in _DROPPED:
        answer = answer.replace(dropped, "")
    return _IDLE_SPACE.sub("", _SPACES.sub(" ", answer)).rstrip(".")


def plain_text(latex: str) -> str:
    r"""Return LaTeX with \text{...}, \mathrm{...} and \mbox{...} replaced by what is in them."""
    return _TEXT_COMMAND.sub(r"\1", latex)


def quick_score(solution: str, ground_truth: str) -> float | None:
    """Return the score where text alone settles it: 1.0 for equal answers, 0.0 for no answer; else None (see `verify`).

    Args:
        solution: the response.
        ground_truth: the right answer, bare or in a box.
    """
    answer = extract_answer(solution)
    if not answer:
        return 0.0
    if normalize(answer) == normalize(_bare_truth(ground_truth)):
        return 1.0
    return 0.0 if len(answer) > LONGEST_PARSED else None


def verify(solution: str, ground_truth: str) -> float:
    """Return 1.0 if math-verify finds the answers equal, else 0.0. May run for ever and take much memory: see above."""
    quick = quick_score(solution, ground_truth)
    if quick is not None:
        return quick
    from math_verify import verify as math_verify

    truth = _parse(_bare_truth(ground_truth))
    answer = _parse(str(extract_answer(solution)))
    # No time limits of its own: they use SIGALRM, which a long C call ignores; the pool kills the process instead.
    return 1.0 if truth and answer and math_verify(truth, answer, timeout_seconds=None) else 0.0


def load() -> None:
    """Import math-verify, so that the time limit of the first sample is not spent on it."""
    import logging

    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the time limits that are left out here


def _bare_truth(ground_truth: str) -> str:
    boxed = last_boxed(ground_truth)
    return ground_truth.strip() if boxed is None else boxed


@lru_cache(maxsize=512)
def _parse(answer: str) -> list[Any]:
    """Return math-verify's readings of one answer; cached, because all responses of a group share a ground truth."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    readings: list[Any] = parse(f"\\boxed{{{answer}}}", extraction_config=targets, parsing_timeout=None)
    return readings
