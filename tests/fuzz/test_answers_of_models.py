"""Whatever a policy writes as its answer is refused, or parsed within bounds; what pays is one answer."""

from __future__ import annotations

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.rewards import gsm8k, math, math_text, multiple_choice

math.load()

PIECES = (
    "4", "17", "2", "0.5", "x", "y", "n o", "AB", "+", "-", "*", "/", "^", "^{2}", "!", "(", ")", "[", "]", "{",
    "}", "|", ",", "=", "<", "%", "$", "_9", "_{8}", "...", " ", "e", "i", "#### ", "\n", r"\frac{1}{2}", r"\frac",
    r"\sqrt{2}", r"\sqrt", r"\cdot ", r"\times ", r"\sum_{k=1}^{9}k", r"\int_0^1 x dx", r"\binom{4}{2}", r"\pi",
    r"\boxed{", r"\text{ or }", r"\text{cm}", r"\left(", r"\right)", r"\gcd(4,2)", r"\begin{pmatrix}",
    r"\end{pmatrix}", "&", r"\\", r"\{", r"\}", r"\cup", r"\infty", r"\pm", r"\log_2", r"\%", "9^9^9", "10^{99}",
    "٣", "４",
)  # fmt: skip
TRUTHS = (
    "4",
    r"\frac{1}{2}",
    r"\sqrt{2}",
    r"2\pi",
    "x+4",
    "(4,17)",
    r"\{2,4\}",
    "y=2",
    "x<4",
    "4_9",
    "AB",
    r"\text{no}",
    "2^{17}",
)
answers = st.lists(st.sampled_from(PIECES), max_size=9).map("".join) | st.text(max_size=40)


@given(answers, st.sampled_from(TRUTHS))
def test_any_answer_is_settled_in_bounded_time(answer: str, truth: str) -> None:
    started = time.monotonic()
    score = math.verify(rf"\boxed{{{answer}}}", truth)
    assert score in (0.0, 1.0)
    assert time.monotonic() - started < 20.0


@given(answers.filter(lambda text: "\n" not in text and "boxed" not in text), st.sampled_from("!|;") | st.just(r"\sum"))
def test_an_operation_that_the_ground_truth_lacks_is_never_paid(answer: str, operation: str) -> None:
    assert math_text.foreign_operations("4", f"4 {operation} {answer}".replace(r"\!", ""))


@given(st.integers(-(10**12), 10**12), st.text(max_size=12))
def test_gsm8k_pays_for_the_number_and_no_other(number: int, behind: str) -> None:
    assert gsm8k.score(f"#### {number}", str(number)) == gsm8k.score(f"#### {number:,}.", str(number)) == 1.0
    if re.match(r"[0-9.,]*[0-9A-Za-z]", behind.partition("\n")[0]) and gsm8k.score(
        f"#### {number}{behind}", str(number)
    ):
        assert re.fullmatch(r"\.0+(?:[^\w].*)?", behind.partition("\n")[0])


@given(answers)
def test_a_letter_is_one_of_the_latin_alphabet(text: str) -> None:
    choice = multiple_choice.extract_answer(text)
    assert choice is None or re.fullmatch("[A-Z]", choice)
