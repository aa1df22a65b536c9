"""The form of a mathematical answer that SymPy can read: whether it is evaluated, and of its ground truth's kind.

Called in a worker process only, and last: math_text.py has settled what text can settle. math-verify decides whether
two values are equal; here it is seen to that they are exact, and that an answer is a result and not a calculation.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from math_verify import verify as math_verify
from math_verify.grader import should_treat_as_complex
from sympy import Add, Basic, E, Eq, Expr, Integer, Interval, MatrixBase, Mul, Pow, Rational, Set, Tuple, nan, zoo
from sympy import FiniteSet as SympyFiniteSet
from sympy.core.relational import Relational
from sympy.functions import exp, factorial
from sympy.matrices.expressions import MatrixExpr

from rlhf_megatron.rewards.math_text import has_numbers_side_by_side, readable

# Of numbers that an expression may come to; a power of more is not computed.
MOST_BITS = 40_000
# Of sums and products, which would be multiplied out.
MOST_EXPONENT_OF_SUM = 40
# Of irrational constants, so that a decimal never passes for one.
DIGITS_COMPARED = 60
# A ground truth with so many decimals is a rounded value, and stands for what rounds to it.
ROUNDED_DECIMALS = 6

_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_PERCENT = re.compile(r"%|percent|pct")
_ROUNDED = re.compile(rf"-?\d*\.(\d{{{ROUNDED_DECIMALS},}})", re.ASCII)
_OPENING = re.compile(r"\s*(?:[^=<>]*(?:=|\\in)\s*)?(\(|\[|\\\{|\\lbrace|\\langle)?")


def is_right(truth: str, answer: str) -> bool:
    """Return whether an answer is evaluated, of its ground truth's kind, and equal to it. May take long: see above."""
    texts = readable(truth), readable(answer)
    if has_numbers_side_by_side(texts[1]):
        return False
    joined = " ".join(texts)
    real = not should_treat_as_complex(joined)
    # Capitals are other variables where both stand; elsewhere x = 5 is X = 5.
    letters = set(re.sub(r"\\[A-Za-z]+", " ", joined))
    both = any(letter.isalpha() and letter.swapcase() in letters for letter in letters)
    gold, given = (_parse(text, real, not both) for text in texts)
    if gold is None or given is None or not all(map(_is_bounded, (gold, given))):
        return False
    chain = _values(given)
    if not all(_equal(_values(gold)[-1], part) for part in chain[1:-1]):
        return False
    if not _is_relation(gold) and len(chain) > 1:
        if not (_is_name(chain[0]) or _equal(gold, chain[0])):
            return False
        given = chain[-1]
    return _is_result(gold, given, truth, answer, texts)


def _is_result(gold: Any, given: Any, truth: str, answer: str, texts: tuple[str, str]) -> bool:
    is_percent = _PERCENT.search(answer) and not _PERCENT.search(truth)
    if is_percent and not (isinstance(gold, Expr) and gold.is_Rational and abs(gold) >= 1):
        return False  # the half that is meant by 0.5 is no 0.5%
    if not _same_kind(gold, given, texts) or not _is_evaluated(gold, given):
        return False
    return _equal(gold, given) or _rounds_to(truth, given)


@lru_cache(maxsize=512)
def _parse(latex: str, real: bool, lowercase: bool) -> Any:
    """Return SymPy's reading of LaTeX, or None; cached, because all responses of a group share a ground truth."""
    try:
        return latex2sympy(
            latex,
            is_real=real,
            normalization_config=_NORMALIZATION,
            conversion_config=ConversionConfig(lowercase_symbols=lowercase),
        )
    except Exception:  # its parser raises plain Exception for text that it cannot read
        return None


def _equal(gold: Any, given: Any) -> bool:
    if isinstance(gold, Expr) and isinstance(given, Expr) and not (gold.free_symbols or given.free_symbols):
        one, other = gold.doit(), given.doit()
        if one.is_Rational and other.is_Rational:
            return bool(one == other)
        if not (one.is_finite and other.is_finite):
            return bool(one == other)
        size = max(abs(one).evalf(DIGITS_COMPARED), abs(other).evalf(DIGITS_COMPARED))
        difference = abs(one - other).evalf(DIGITS_COMPARED, maxn=4 * DIGITS_COMPARED, chop=False)
        if size.is_Float and difference.is_number and difference.is_finite:
            return bool(difference <= size * Rational(1, 10 ** (DIGITS_COMPARED - 10)))
    # No time limit of math-verify's own: it uses SIGALRM, which a long C call ignores; the pool kills the process.
    return bool(
        math_verify(
            [gold],
            [given],
            float_rounding=DIGITS_COMPARED,
            numeric_precision=DIGITS_COMPARED,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _rounds_to(truth: str, given: Any) -> bool:
    """Return whether a ground truth of many decimals is an answer's rounded value."""
    match = _ROUNDED.fullmatch(truth.strip().strip("$"))
    if match is None or not isinstance(given, Expr) or given.free_symbols:
        return False
    error = abs(given - Rational(match.group())).evalf(DIGITS_COMPARED)
    return bool(error.is_real and error <= Rational(1, 2 * 10 ** len(match.group(1))))


def _is_relation(tree: Any) -> bool:
    return isinstance(tree, (Relational, And))


def _values(tree: Any) -> list[Any]:
    """Return the sides of an equation, or of a chain of them such as x = 2 + 2 = 4; one value for anything else."""
    if isinstance(tree, And) and all(isinstance(part, Eq) for part in tree._unsorted_args):
        return [tree._unsorted_args[0].lhs, *(part.rhs for part in tree._unsorted_args)]
    return [tree.lhs, tree.rhs] if isinstance(tree, Eq) else [tree]


def _is_name(tree: Any) -> bool:
    """Return whether the left side of "x = 5" names something: x, f(2), P(A), but no number."""
    return bool(getattr(tree, "free_symbols", None)) or bool(getattr(tree, "is_Function", False))


def _same_kind(gold: Any, given: Any, texts: tuple[str, str]) -> bool:
    """Return whether an answer is a number, a list, an interval, a relation, ... as its ground truth is."""
    if _is_undefined(given):
        return False
    if _is_relation(gold):
        return _fits_relation(gold, given, texts)
    if _is_relation(given):
        open_pair = isinstance(gold, Interval) and gold.is_open and gold.measure.is_finite  # may be a point
        return isinstance(gold, Set) and not isinstance(gold, SympyFiniteSet) and not open_pair
    matrices = MatrixBase, MatrixExpr
    if isinstance(gold, matrices) or isinstance(given, matrices):
        explicit = isinstance(given, MatrixBase) or not isinstance(gold, MatrixBase)
        return isinstance(gold, matrices) and isinstance(given, matrices) and explicit
    if isinstance(gold, Expr) or isinstance(given, Expr):
        if not (isinstance(gold, Expr) and isinstance(given, Expr)):
            alone = any(isinstance(tree, SympyFiniteSet) and len(tree) == 1 for tree in (gold, given))
            return alone and "[" not in texts[1]
        return given.free_symbols <= gold.free_symbols
    return _same_brackets(gold, given, texts)


def _is_undefined(tree: Any) -> bool:
    return isinstance(tree, Basic) and bool(tree.has(nan, zoo))


def _fits_relation(gold: Any, given: Any, texts: tuple[str, str]) -> bool:
    if _is_relation(given):
        sides = _values(given)
        trivial = any(one == other for one, other in itertools.pairwise(sides))
        return not trivial and bool(given.free_symbols) and given.free_symbols == gold.free_symbols
    if isinstance(given, Set):
        return bool(isinstance(gold, Eq) or _OPENING.match(texts[1]).group(1))  # type: ignore[union-attr]
    named = isinstance(gold, Eq) and not isinstance(gold.lhs, Add) and gold.lhs.free_symbols
    return bool(named) and given.free_symbols <= gold.free_symbols


def _same_brackets(gold: Any, given: Any, texts: tuple[str, str]) -> bool:
    """Return whether a pair in parentheses is none in braces; without brackets a list stands for both."""
    if {type(gold), type(given)} <= {type(gold)}:
        return True
    pairs = [isinstance(tree, (Interval, Tuple)) for tree in (gold, given)]
    braced = [(_OPENING.match(text) or [None, None])[1] in (r"\{", r"\lbrace") for text in texts]
    return not ((pairs[0] and braced[1]) or (pairs[1] and braced[0]))


def _is_bounded(tree: Any) -> bool:
    """Return whether evaluating a tree makes no number of more than MOST_BITS and multiplies no long product out."""
    try:
        return _bits(tree) <= MOST_BITS
    except (OverflowError, TypeError, ValueError):
        return False


def _bits(tree: Any) -> float:
    if isinstance(tree, Rational):
        return float(max(abs(tree.p), tree.q).bit_length())
    if isinstance(tree, Pow):
        base, power = tree.args
        inner = max(_bits(base), _bits(power))
        if power.free_symbols or inner > MOST_BITS:
            return inner
        size = abs(float(power.evalf(15)))
        if isinstance(base, Add) and size > MOST_EXPONENT_OF_SUM:
            return float("inf")
        return max(_bits(base), 1.0) * max(size, 1.0)
    if isinstance(tree, factorial):
        [number] = tree.args
        if not number.is_Integer:
            return _bits(number) if number.free_symbols else float("inf")
        return float(number) * 14
    parts = [_bits(part) for part in _parts(tree)]
    return sum(parts) if isinstance(tree, Mul) else max(parts, default=1.0)


def _parts(tree: Any) -> tuple[Any, ...]:
    return tuple(tree.flat()) if isinstance(tree, MatrixBase) else tuple(getattr(tree, "args", ()))


def _subtrees(tree: Any) -> Iterator[Any]:
    yield tree
    for part in _parts(tree):
        yield from _subtrees(part)


def _is_evaluated(gold: Any, given: Any) -> bool:
    """Return whether an answer leaves nothing to be computed that its ground truth does not leave too."""
    left = _calculations(given) - _calculations(gold)
    if left or _roots_deep(given) > max(1, _roots_deep(gold)):
        return False
    results = [_values(tree)[-1] for tree in (gold, given)]
    return not all(isinstance(tree, Expr) for tree in results) or _is_literal(results[1]) or not _is_literal(results[0])


def _is_literal(tree: Any) -> bool:
    """Return whether a number is written as a result: whole, decimal, a fraction, mixed, or times a power of ten."""
    if isinstance(tree, Pow):
        return tree.base == 10 and bool(tree.exp.is_Integer)
    if isinstance(tree, Mul):
        numbers = [part for part in tree.args if part != -1]
        powers = [part for part in numbers if isinstance(part, Pow)]
        rest = [part for part in numbers if not isinstance(part, Pow)]
        return len(powers) <= 1 and len(rest) <= 1 and all(map(_is_literal, powers)) and all(map(_is_literal, rest))
    return bool(getattr(tree, "is_Rational", False)) or str(tree) in ("oo", "-oo")


def _calculations(tree: Any) -> set[str]:
    """Return which operations are left to be carried out in a tree: sum, product, power, root, fraction."""
    return {kind for part in _subtrees(tree) for kind in _calculations_at(part)}


def _calculations_at(tree: Any) -> Iterator[str]:
    if isinstance(tree, Add):
        terms = [(part if part.free_symbols else part.doit()).as_coeff_Mul()[1] for part in tree.args]
        if (
            len(set(terms)) < len(terms)
            or 0 in tree.args
            or sum(not part.free_symbols and _is_literal(part) for part in tree.args) > 1
        ):
            yield "sum"
    elif isinstance(tree, Mul) and not _is_literal(tree):
        above, below = _factors(tree)
        if above > 1 or below > 1:
            yield "product"
        bases = [part.base if isinstance(part, Pow) else part for part in _flat(tree) if not _is_fraction_part(part)]
        if len(set(bases)) < len(bases):
            yield "product"
    elif isinstance(tree, Pow) and not (tree.base == 10 and tree.exp.is_Integer):
        if tree.exp in (0, 1):
            yield "power"
        elif not tree.base.free_symbols and _is_literal(tree.base):
            if tree.exp.is_Integer and tree.exp != -1:
                yield "power"
            elif tree.exp == -1 and not isinstance(tree.base, Integer):
                yield "fraction"
            elif tree.exp.is_Rational and not tree.exp.is_Integer and (tree.base**tree.exp).is_Rational:
                yield "root"
    elif isinstance(tree, exp) and tree.args[0] == 0:
        yield "power"


def _is_fraction_part(tree: Any) -> bool:
    return isinstance(tree, Rational) or (
        isinstance(tree, Pow) and isinstance(tree.base, Rational) and tree.exp.is_Integer
    )


def _flat(tree: Mul) -> Iterator[Any]:
    for part in tree.args:
        if isinstance(part, Mul):
            yield from _flat(part)
        else:
            yield part


def _factors(tree: Mul) -> tuple[int, int]:
    """Return how many rational numbers stand above and below the line of a product; -1 is a sign and no number."""
    above = below = 0
    for part in _flat(tree):
        if isinstance(part, factorial) and not part.free_symbols:
            above += 1
        elif isinstance(part, Rational) and part != -1:
            above += abs(part.p) != 1 or part.q == 1
            below += part.q != 1
        elif isinstance(part, Pow) and part.exp == -1:
            inner = _factors(part.base) if isinstance(part.base, Mul) else (int(isinstance(part.base, Rational)), 0)
            above, below = above + inner[1], below + inner[0]
    return above, below


def _roots_deep(tree: Any) -> int:
    """Return how deep roots stand within roots."""
    inner = max((_roots_deep(part) for part in _parts(tree)), default=0)
    is_root = isinstance(tree, Pow) and tree.base != E and tree.exp.is_Rational and not tree.exp.is_Integer
    return inner + 1 if is_root else inner
