r"""Multiple choice: the letter that a response settles on, in its last \boxed{} or behind its last "answer is"."""

from __future__ import annotations

import re

from rlhf_megatron.rewards import math

# One letter, in brackets or bare, that does not begin a word and that no second letter follows as in "A, B" or "A or
# B": naming all choices is no answer. A small letter may be a word, so it counts only at the end of its line.
# Possessive (*+), so that no part gives way to let a second letter pass.
_LETTER = (
    r"[\[({$]*+([A-Z](?![\w'])|[a-z](?=[\])}$*.:]*+[ \t]*+(?:\n|\Z)))[\])}$*.:]*+"
    r"(?!\s*(?:[,;/|&+-]|(?:or|and|to|vs)\b)\s*[\[({$*]*[A-Z](?!\w))"
)
_STATED = re.compile(rf"(?i:\banswer)[*]*+(?:\s+(?i:is)\b[*]*+:?|\s*+:)[\s*]*+{_LETTER}")
# The option's own text may follow its letter: "B. Paris".
_BOXED = re.compile(rf"{_LETTER}(?:(?<=[\])}}.:])\s.*)?", re.DOTALL)
_BARE = re.compile(r"[(\[]?([A-Za-z])[)\].]?")


def extract_answer(text: str) -> str | None:
    r"""Return the capital letter of the chosen option, or None.

    It is read from the last \boxed{...} ("\boxed{B}", "\boxed{\text{(B)}}", "\boxed{B. Paris}"), else behind the last
    "Answer: B", "answer is (B)" or the like, else from a response that is nothing but a letter.
    """
    boxed = math.last_boxed(text)
    if boxed is not None:
        match = _BOXED.fullmatch(math.plain_text(boxed).strip())
        return match.group(1).upper() if match else None
    stated = _STATED.findall(text)
    if stated:
        return str(stated[-1]).upper()
    bare = _BARE.fullmatch(text.strip())
    return bare.group(1).upper() if bare else None


def score(solution: str, ground_truth: str) -> float:
    """Return 1.0 if the response settles on the letter of the ground truth ("B", "(b)" or "B."), else 0.0.

    Raises:
        ValueError: the ground truth is not one letter.
    """
    truth = _BARE.fullmatch(ground_truth.strip())
    if truth is None:
        raise ValueError(f"ground_truth {ground_truth[:80]!r} is not one letter")
    return 1.0 if extract_answer(solution) == truth.group(1).upper() else 0.0
