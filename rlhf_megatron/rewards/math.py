r"""Mathematics: the last \boxed{...} (or the last "Answer:" line) of a response against the ground truth; DAPO's rule.

Equal text is settled at once; the rest is compared by math-verify (SymPy), which hostile text such as 9^9^9^9 can hang:
``verify`` is therefore only called in a worker process (worker.py) that is killed at a time limit.
"""

from __future__ import annotations

import re

from rlhf_megatron.rewards.math_text import LONGEST_PARSED, plain_text, settled, with_ascii_signs, with_fractions

_ANSWER_LINE = re.compile(r"(?i:\banswer)(?:[ ]is)?[ \t]*:([^\n]+)")
_DROPPED = ("\\left", "\\right", "\\!", "$", "^\\circ", "^{\\circ}")
_SPACES = re.compile(r"(?:\\[,; ]|\s)+")
# Between digits a space says something, unless it parts thousands: "1 1/2" is not 11/2, and "3 4" is not 34.
_IDLE_SPACE = re.compile(r"(?<!\d) | (?!\d)| (?=\d{3}(?!\d))", re.ASCII)
_BRACE = re.compile(r"\\boxed\{|[{}]")
_ONLY_BOX = re.compile(r"[$\s]*\\f?box(?:ed)?\{(.*)\}[$\s.]*", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} whose braces close and that stands in no other, or None; linear."""
    opened: list[tuple[int, bool]] = []
    boxes: list[tuple[int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace.group() != "}":
            opened.append((brace.end(), brace.group() != "{"))
        elif opened:
            start, is_box = opened.pop()
            if is_box:
                while boxes and boxes[-1][0] > start:
                    boxes.pop()
                boxes.append((start, brace.start()))
    return text[slice(*boxes[-1])].strip() if boxes else None


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
    # Of several boxes none is the answer.
    form = normalize(_bare_truth(answer) if answer.count("\\boxed") < 2 else answer)
    digits = re.fullmatch(r"([-+]?)(\d{1,3}(?:,\d{3})+|\d+)(?:\.0*)?", form, re.ASCII)
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
    return _IDLE_SPACE.sub("", _SPACES.sub(" ", answer)).removesuffix(".")


def quick_score(solution: str, ground_truth: str) -> float | None:
    """Return the score where text alone settles it: 1.0 for equal answers, 0.0 for no answer; else None (see
    ``verify``).

    Args:
        solution: the response.
        ground_truth: the right answer, bare or in a box.
    """
    answer, truth = _answer(solution), _bare_truth(ground_truth)
    if not answer:
        return 0.0
    if normalize(answer) == normalize(truth):
        return 1.0
    return settled(with_fractions(truth), with_fractions(answer))


def verify(solution: str, ground_truth: str) -> float:
    """Return 1.0 if the answer is right, else 0.0. May run for ever and take much memory: see above."""
    quick = quick_score(solution, ground_truth)
    if quick is not None:
        return quick
    from rlhf_megatron.rewards import math_form

    texts = _bare_truth(ground_truth), str(_answer(solution))
    return 1.0 if math_form.is_right(*map(with_fractions, texts)) else 0.0


def load() -> None:
    """Import math-verify, so that the time limit of the first sample is not spent on it."""
    import logging

    import math_verify  # noqa: F401

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the time limits that are left out here


def _answer(solution: str) -> str | None:
    """Return a response's answer with signs as LaTeX and without a box that all of it stands in, or None."""
    answer = with_ascii_signs(extract_answer(solution) or "").strip()
    while len(answer) <= LONGEST_PARSED and (box := _ONLY_BOX.fullmatch(answer)):
        inner = box.group(1).strip()
        if last_boxed(rf"\boxed{{{inner}}}") != inner:
            break
        answer = inner
    return answer or None


def _bare_truth(ground_truth: str) -> str:
    boxed = last_boxed(ground_truth)
    return with_ascii_signs(ground_truth if boxed is None else boxed).strip()
