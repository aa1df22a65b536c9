r"""Mathematics: the last \boxed{...} (or the last "Answer:" line) of a response against the ground truth.

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
_DROPPED = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\ ", "$", " ", "\n", "\t", "^\\circ", "^{\\circ}")
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
    if boxed is not None:
        return boxed
    lines = _ANSWER_LINE.findall(text)
    return lines[-1].strip().strip("*").strip() if lines else None


def normalize(answer: str) -> str:
    r"""Return an answer without what carries no meaning in LaTeX: spaces, $, \left, \text{}, a final dot."""
    answer = _TEXT_COMMAND.sub(r"\1", answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    for dropped in _DROPPED:
        answer = answer.replace(dropped, "")
    return answer.rstrip(".")


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
