r"""Text of a mathematical answer before it is parsed: words, number bases, units, and operations.

Pure, and fast on any text, so that a rank can call it. ``settled`` decides what text alone can decide; ``readable`` is
what math_form.py may parse, within bounds of size and nesting: the parser takes seconds for fifteen braces.
"""

from __future__ import annotations

import re

# Longer answers are compared as text only. What is much longer than its ground truth is a calculation, no answer.
LONGEST_PARSED = 600
LENGTH_OVER_TRUTH, FREE_LENGTH = 4, 80
DEEPEST = 6
MOST_DIGITS = 100
# Of exponents, and of every number where factorials or binomials stand.
MOST_EXPONENT_DIGITS = 4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ",
        "°": r"^\circ ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    }
)  # fmt: skip
_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\{([^{}]*)\}"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_BASES = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASE_WORDS = dict((word, base) for base, word in enumerate(_BASES.split(), 2))
_BASED = re.compile(r"(-?)([0-9A-Fa-f]+)(?:_\{?\(?(\d{1,2}|[a-z]+)\)?\}?)?", re.ASCII)
_HAS_BASE = re.compile(r"(?:[0-9][0-9A-Fa-f]*|\))\s*_", re.ASCII)
_UNIT_IN_TEXT = re.compile(
    r"(?:\\[ ,;]|[\s~])*\\(?:text|textbf|textrm|textnormal|mathrm|mbox)\{([^{}0-9]*)\}(?:\^\{?[23]\}?)?$"
)
_UNIT_WORDS = re.compile(
    r"(?:(?<=[\d})])\s*(cm|mm|km|ft|kg|mph|hrs?|lbs?|sec|min|deg)|(?<=[\d}) ])\s+([A-Za-z][a-z]{3,}))((?: [a-z]+){0,3})"
    r"(?:\^\{?[23]\}?)?$"
)
# Words that change what they stand behind; such an answer is compared as text.
_NO_UNITS = _words(
    "a and at because but equals except from hundred if in is million minus more less no not of only or over plus "
    "than then thousand times to trillion billion dozen unless until where with without pi sqrt infinity"
)
_SAME_UNIT = {
    word: words.split()[0]
    for words in (
        "mm millimeter millimeters millimetre millimetres", "cm centimeter centimeters centimetre centimetres",
        "m meter meters metre metres", "km kilometer kilometers kilometre kilometres", "in inch inches",
        "ft foot feet", "yd yard yards", "mi mile miles", "s sec second seconds", "min minute minutes",
        "h hr hrs hour hours", "day days", "week weeks", "month months", "year years", "g gram grams",
        "kg kilogram kilograms", "lb lbs pound pounds", "dollar dollars", "cent cents", "degree degrees",
        "radian radians",
    )
    for word in words.split()
}  # fmt: skip
# Commands that are part of how an evaluated answer is written; others must stand in the ground truth too.
_NOTATION = _words(
    "frac dfrac tfrac cfrac sqrt pi cdot times left right quad qquad circ degree infty pm mp le leq leqslant ge geq "
    "geqslant lt gt ne neq in cup cap setminus mathbb emptyset varnothing begin end displaystyle exp "
    "alpha beta gamma delta epsilon varepsilon theta lambda mu nu rho sigma tau phi varphi omega Delta Omega "
    "angle triangle langle rangle lbrace rbrace lparen rparen text"
)
# Commands that say the same: one of them in the ground truth allows them all.
_FAMILIES = (
    _words("log ln lg"),
    _words("sin cos tan cot sec csc"),
    _words("arcsin arccos arctan arccot sin cos tan"),
    _words("binom dbinom tbinom choose"),
    _words("bmod mod pmod"),
    _words("ldots dots cdots"),
)
_WRITTEN_OPERATIONS = {
    "derivative": re.compile(r"\\frac\s*\{?\s*d\s*\}?\s*\{\s*d\s*[a-z]"),
    "fraction of a fraction": re.compile(r"\\[dtc]?frac\s*\{[^{}a-z]*\\[dtc]?frac\s*\{?\s*\d"),
}
_LIST_OF_WORDS = re.compile(r"[A-Za-z](?:[A-Za-z .'-]*[A-Za-z])?\.?(?:, ?[A-Za-z](?:[A-Za-z .'-]*[A-Za-z])?\.?)*")
_QUANTITY = re.compile(r"[-+$\\]*[\d.,]+\s*[A-Za-z][A-Za-z ]*", re.ASCII)
_SIDE_BY_SIDE = re.compile(
    r"(?<!_)(?:\d[ )]* \(?\d|\d[ )]*\( ?[\d.,]+ ?\))|(?<!\\frac)\d ?\{|\\frac\{[^{}]*\}\{[^{}]*\} ?\d", re.ASCII
)
_RATIO = re.compile(r"(?:^|=)\s*([-\d.]+)\s*:\s*([\d.]+)(?:\s*:\s*([\d.]+))?[\s$]*$", re.ASCII)
_REPEATING = re.compile(
    r"(?<![\d.,])(\d{0,20})\.(\d{0,20})\\(?:overline|bar|dot)\s?\{?(\d{1,20})\}?(?![\d.{\\])", re.ASCII
)
_FRACTION_OF_DIGITS = re.compile(r"\\([dt]?frac) +(\d) +(\d)(?!\d)", re.ASCII)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])", re.ASCII)
_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+)(?![\d,])", re.ASCII)
_DROPPED = re.compile(
    r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle)(?![A-Za-z])|(?<!\\)\\(?:!\s*|[()])|[$\"]"
)
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])")
_ENVIRONMENT = re.compile(r"\\begin\{(\w*)\}")


def with_ascii_signs(text: str) -> str:
    """Return a text with the Unicode signs of mathematics (minus, times, pi, ...) as LaTeX."""
    return text.translate(_SYMBOLS)


def with_fractions(text: str) -> str:
    r"""Return LaTeX with repeating decimals, 0.1\overline{6}, and fractions without braces, \frac 1 2, as \frac{}{}."""
    return _FRACTION_OF_DIGITS.sub(r"\\\1{\2}{\3}", _REPEATING.sub(_repeating_as_fraction, text))


def _repeating_as_fraction(match: re.Match[str]) -> str:
    before, period = match.group(1) + match.group(2), match.group(3)
    if not period.strip("9"):
        return match.group()  # 3.999... is how no result is written
    above = int(before + period) - int(before or "0")
    return rf"\frac{{{above}}}{{{'9' * len(period)}{'0' * len(match.group(2))}}}"


def plain_text(latex: str) -> str:
    r"""Return LaTeX with \text{...}, \mathrm{...} and the like replaced by what is in them."""
    return _TEXT_COMMAND.sub(r"\1", latex)


def settled(truth: str, answer: str) -> float | None:
    """Return the score of an answer where text decides it: words, bases, and what is not to be parsed; else None.

    Args:
        truth: the ground truth, without its box.
        answer: the response's answer, without its box, that is not equal to it as text.
    """
    if len(truth) > LONGEST_PARSED or len(answer) > min(LONGEST_PARSED, LENGTH_OVER_TRUTH * len(truth) + FREE_LENGTH):
        return 0.0
    truth_words, answer_words = words(truth), words(answer)
    if truth_words is not None:
        return float(truth_words == words(answer, one_letter=True))
    if _HAS_BASE.search(plain_text(answer)) or _HAS_BASE.search(plain_text(truth)):
        return float(_same_in_base(truth, answer))
    if (
        answer_words is not None
        and answer_words != ["pi"]
        and answer_words != ["infinity"]
        and len(answer_words[0]) > 1
    ):
        return 0.0
    ratios = [_RATIO.search(text) for text in (truth, answer)]
    if ratios[0] and ratios[1]:  # times of day, or ratios in lowest terms
        return float(ratios[0].groups() == ratios[1].groups())
    if units_differ(truth, answer) or not (is_tame(truth) and is_tame(answer)) or foreign_operations(truth, answer):
        return 0.0
    return None


def words(answer: str, one_letter: bool = False) -> list[str] | None:
    r"""Return the words of an answer that is text ("\text{(B)}", "CBA", "A, C"), in order and small letters, or None.

    Letters side by side are words and no product, so that "on" is not "no". Products are small letters among which no
    vowel is, and x, y and z.
    One letter outside of \text{} is a variable, unless ``one_letter`` says otherwise.
    """
    text = plain_text(answer.replace(r"\ ", " ").replace("~", " ")).replace("$", "").strip()
    text = re.sub(r"\s+", " ", text).strip(" .\"'")
    in_text = bool(_TEXT_COMMAND.fullmatch(answer.strip().strip("$")))
    if in_text and re.search(r"[A-Za-z]", text) and not _QUANTITY.fullmatch(text) and re.search(r"\d", text):
        return [re.sub(r"[ .]", "", text).casefold()]
    bare = re.sub(r"^\(([A-Za-z]+)\)$", r"\1", text)
    bare = re.sub(r"[,;]? (?:and|or) ", ", ", bare) if "," in bare else bare
    letters = bare.replace(" ", "")
    if (
        not _LIST_OF_WORDS.fullmatch(bare)
        or (len(letters) == 1 and not (in_text or one_letter))
        or (
            len(letters) > 1
            and not in_text
            and ((letters.islower() and not set(letters) & set("aeiouy")) or set(letters) <= set("xyz"))
        )
    ):
        return None
    parts = (re.sub(r"^(?:an?|the) ", "", part.strip().casefold()) for part in bare.split(","))
    return sorted(re.sub(r"[ .'-]", "", part) for part in parts)


def _same_in_base(truth: str, answer: str) -> bool:
    """Return whether two numerals have the same digits in the same base; a bare one has the ground truth's, or ten."""
    forms = [
        _BASED.fullmatch(_DROPPED.sub("", _SPACE.sub("", plain_text(text))).replace(" ", ""))
        for text in (truth, answer)
    ]
    if forms[0] is None or forms[1] is None:
        return False
    bases = [_BASE_WORDS.get(form.group(3), form.group(3)) if form.group(3) else None for form in forms if form]
    asked = str(bases[0] or 10)
    given = str(bases[1] or asked)
    digits = [(form.group(1), form.group(2).upper().lstrip("0")) for form in forms if form]
    return digits[0] == digits[1] and asked == given


def units_differ(truth: str, answer: str) -> bool:
    """Return whether both name a unit that is known, and not the same one."""
    known = []
    for text in (truth, answer):
        unit = split_unit(text)[1]
        names = {_SAME_UNIT[word] for word in unit.casefold().split() if word in _SAME_UNIT}
        known.append(
            names | ({"dollar"} if text.lstrip().startswith((r"\$", "$")) and not text.endswith("$") else set())
        )
    return bool(known[0] and known[1] and known[0] != known[1])


def split_unit(text: str) -> tuple[str, str]:
    r"""Return a quantity and its unit, as in "5\text{ cm}^2" and "18 dollars"; "" where there is none."""
    text = text.strip().rstrip(".")
    for pattern in (_UNIT_IN_TEXT, _UNIT_WORDS):
        match = pattern.search(text)
        quantity = text[: match.start()].strip() if match else ""
        if match is None or not quantity or not re.search(r"[\d}a-z)]", quantity):
            continue
        unit = " ".join(group for group in match.groups() if group).replace("~", " ").strip()
        given = re.findall(r"[a-z]+", unit.casefold())
        if len(given) <= 4 and not _NO_UNITS.intersection(given) and re.fullmatch(r"[A-Za-z ./-]*", unit):
            return quantity, unit
    return text, ""


def is_tame(text: str) -> bool:
    """Return whether a text may be parsed: its nesting, digits, exponents and signs in a row."""
    text = text.replace("\\!", "")
    depth = deepest = 0
    for sign in text:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(sign, 0)
        deepest = max(deepest, depth)
    longest = max(map(len, re.findall(r"\d+", text)), default=0)
    heavy = "!" in text or re.search(r"binom|choose|Gamma|zeta", text)
    towers = re.search(
        rf"\^\s*\{{[^{{}}]*[\^!]|\^\s*[^{{\s]\s*\^|\^\s*\{{?\s*-?\s*\d{{{MOST_EXPONENT_DIGITS + 1},}}", text
    )
    signs = re.search(r"[-+]\s*[({]?\s*-|!!|%\s*\\?%|\.\s*\.|\|\s*\|\s*\|", text)
    small = longest <= (MOST_EXPONENT_DIGITS if heavy else MOST_DIGITS)
    return text.isascii() and deepest <= DEEPEST and small and not towers and not signs and text.count(r"\sqrt") <= 12


def foreign_operations(truth: str, answer: str) -> set[str]:
    r"""Return the operations of an answer, such as \sum and !, that no result needs and its ground truth lacks."""
    used, asked = _operations(answer), _operations(truth)
    allowed = asked.union(*(family for family in _FAMILIES if family & asked))
    return used - allowed


def _operations(latex: str) -> set[str]:
    text = plain_text(split_unit(latex.replace("\\!", ""))[0])
    # "ln" and its like also come without a backslash; what they mean there, the parser does not see.
    commands = set(_COMMAND.findall(text.replace("\\\\", " "))) - _NOTATION
    bare = set(re.findall(r"(?<![A-Za-z\\])(?:gcd|lcm|mod|max|min|det|log|ln|sin|cos|tan|choose)(?![A-Za-z])", text))
    environments = set(_ENVIRONMENT.findall(text)) - {"pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix"}
    signs = {sign for sign in "!|'?;&@#" if sign in text.replace(r"\%", "")} - ({"&"} if "matrix" in text else set())
    signs |= {name for name, pattern in _WRITTEN_OPERATIONS.items() if pattern.search(text)}
    return commands | bare | signs | environments


def readable(latex: str) -> str:
    """Return LaTeX in a form that math-verify's parser reads exactly: no units and percents, decimals as fractions."""
    text = plain_text(split_unit(latex)[0]).strip().rstrip(".").replace(r"\$", "")
    text = (
        _DROPPED.sub("", _SPACE.sub(" ", text).replace(r"\{,\}", ",").replace("{,}", ","))
        .replace("\\dfrac", "\\frac")
        .replace("\\tfrac", "\\frac")
    )
    text = re.sub(r"\s*\^\s*\{?\s*(?:\\circ|\\degree)\s*\}?|\\degree(?![a-z])", "", text)
    text = re.sub(r"\s*(?:\\?%|percentage|percent|pct)(?![A-Za-z])", "", text).strip()
    text = re.sub(r"\\varnothing|^\\\{\s*\\\}$", lambda _: r"\emptyset", text)
    text = re.sub(r"(?<![A-Za-z\\])(pi|infinity)(?![A-Za-z])", r"\\\1", text).replace(r"\infinity", r"\infty")
    text = re.sub(r"^(-?[\d.]+)[eE]([-+]?\d{1,3})$", r"\1\\times 10^{\2}", text)
    text = re.sub(r"^(-?\d+) +(\d+)/(\d+)$", r"\1\\frac{\2}{\3}", text)
    text = re.sub(r"(?<=\d)\s+(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\log_(?:e(?![A-Za-z])|\{e\})", r"\\ln ", text)
    if "," in text and not re.search(r"[(\[{]\s*-?\d{1,3},", text.replace("\\frac{", " ").replace("}{", " ")):
        text = _THOUSANDS.sub(lambda match: match.group(1) + match.group(2).replace(",", ""), text)
    text = _DECIMAL.sub(_as_fraction, text)
    # Capitals side by side are points, and no product.
    return re.sub(r"\\[A-Za-z]+|[A-Z]{2,}", lambda match: _points(match.group()), text)


def has_numbers_side_by_side(text: str) -> bool:
    """Return whether numbers follow each other with no operation between, which the parser would add or multiply."""
    return bool(_SIDE_BY_SIDE.search(text))


def _points(run: str) -> str:
    return run if run.startswith("\\") else rf"\text{{{run}}}"


def _as_fraction(match: re.Match[str]) -> str:
    whole, decimals = match.group(1).lstrip("0"), match.group(2).rstrip("0")
    number = (whole + decimals).lstrip("0") or "0"
    return rf"\frac{{{number}}}{{1{'0' * len(decimals)}}}" if decimals else number
