"""The mathematics rule on lists of answers: what means the same is paid, what is no answer is not.

tests/answers/right.txt and wrong.txt hold the pairs, one a line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.rewards import gsm8k, math, math_text, multiple_choice
from rlhf_megatron.rewards.score import ScoreItem, Scorer

ANSWERS = Path(__file__).resolve().parents[1] / "answers"
# Right, and not paid: (0,1) may also be a point.
KNOWN_FALSE_NEGATIVES = {("(0,1)", "0<x<1")}


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    with Scorer(RewardSection(timeout_seconds=20.0, workers=1)) as made:
        yield made


def pairs(name: str) -> list[tuple[str, str]]:
    lines = [line for line in (ANSWERS / name).read_text().splitlines() if line and not line.startswith("#")]
    return [(truth, answer.strip()) for truth, _, answer in (line.partition(" |||") for line in lines)]


def paid(scorer: Scorer, listed: list[tuple[str, str]]) -> set[tuple[str, str]]:
    items = [ScoreItem("math", rf"So it is \boxed{{{answer}}}.", truth, {}, 0) for truth, answer in listed]
    return {pair for pair, score in zip(listed, scorer.score(items), strict=True) if score == 1.0}


def test_answers_that_mean_the_same_are_paid(scorer: Scorer) -> None:
    listed = pairs("right.txt")
    assert len(listed) == 409
    assert set(listed) - paid(scorer, listed) == KNOWN_FALSE_NEGATIVES


def test_what_is_no_answer_is_not_paid_and_costs_no_worker(scorer: Scorer) -> None:
    listed = pairs("wrong.txt")
    assert len(listed) == 653
    assert paid(scorer, listed) == set()
    assert scorer.timeouts + scorer.failures == 0


def test_a_ground_truth_written_so_is_right_by_its_own_text(scorer: Scorer) -> None:
    truths = [truth for truth, _ in pairs("right.txt") + pairs("wrong.txt")]
    assert paid(scorer, [(truth, truth) for truth in truths]) == {(truth, truth) for truth in truths}


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        (r"\boxed{\boxed{4}}", 1.0),
        (r"\boxed{\fbox{4}}", 1.0),
        (r"\boxed{5} no, \boxed{4}", 1.0),
        (r"\boxed{4} no, \boxed{5}", 0.0),
        (r"\boxed{\boxed{5}\boxed{4}}", 0.0),
        (r"\boxed{5 \text{ or } \boxed{4}}", 0.0),
        (r"\boxed{4} and so \boxed{}", 0.0),
        ("Answer: 4", 1.0),
        ("Answer: 4 or 5", 0.0),
        (r"Answer: 2+2", 0.0),
        (r"Answer: $\sum_{k=1}^{4}1$", 0.0),
    ],
)
def test_one_box_holds_the_answer(scorer: Scorer, solution: str, expected: float) -> None:
    assert scorer.score([ScoreItem("math", solution, "4", {}, 0)]) == [expected]


@pytest.mark.parametrize(
    ("behind", "truth", "expected"),
    [
        ("1e3", "1", 0.0),
        ("1e3", "1000", 0.0),
        ("1/2", "1", 0.0),
        ("1.5.2", "1.5", 0.0),
        ("1:30", "1", 0.0),
        ("12abc", "12", 0.0),
        ("18!", "18", 0.0),
        ("18²", "18", 0.0),
        ("18½", "18", 0.0),
        ("18-20", "18", 0.0),
        ("18 - 20", "18", 0.0),
        ("3 or 4", "3", 0.0),
        ("3 or four", "3", 0.0),
        ("3, 4", "3", 0.0),
        ("1,2,3", "123", 0.0),
        ("1,23", "123", 0.0),
        ("1 000", "1", 0.0),
        ("5 million", "5", 0.0),
        ("٣", "3", 0.0),
        ("３", "3", 0.0),
        ("3\n#### 4", "3", 0.0),
        ("50%", "50", 1.0),
        ("18 dollars a day", "18", 1.0),
        ("18, which is all.", "18", 1.0),
        ("18\n\nIn 2 days.", "18", 1.0),
        ("−3", "-3", 1.0),
        ("12,345,678.50", "12345678.5", 1.0),
    ],
)
def test_gsm8k_reads_one_whole_number(behind: str, truth: str, expected: float) -> None:
    assert gsm8k.score(f"So.\n#### {behind}", truth) == expected


@pytest.mark.parametrize("truth", ["1e3", "1/2", "3 or 4", "", "٣"])
def test_gsm8k_tells_ground_truths_that_are_no_number(truth: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        gsm8k.score("#### 1", truth)


@pytest.mark.parametrize(
    "solution",
    [
        "Answer: A; B",
        "Answer: A|B",
        "Answer: A + B",
        "Answer: A-D",
        "Answer: A to D",
        "Answer: А",  # Cyrillic
        r"\boxed{\boxed{A}\boxed{B}}",
        r"\boxed{A}\boxed{}",
        r"\boxed{A B}",
    ],
)
def test_multiple_choice_pays_for_one_latin_letter(solution: str) -> None:
    assert multiple_choice.score(solution, "A") == multiple_choice.score(solution, "B") == 0.0


@pytest.mark.parametrize("line", [r"\boxed{35}\boxed{34}", "34, 35", "34/1", "34e0", "33+1", "٣٤"])
def test_dapo_pays_for_one_whole_number(line: str) -> None:
    assert math.dapo_score(f"Answer: {line}", "34") == 0.0


def test_long_and_nested_answers_are_refused_in_linear_time() -> None:
    started = time.monotonic()
    for part in (
        "a ",
        "(",
        "{",
        r"\boxed{",
        r"\frac{1}{",
        "}",
        "1,",
        "A, ",
        r"\text{a}",
        "9",
        "-",
        "1 ",
        "^1",
        "$",
        r"\ ",
    ):
        text = part * (200_000 // len(part))
        assert math.quick_score(rf"\boxed{{{text}}}", "4") in (0.0, None)
        assert math.quick_score(f"Answer: {text}", "4") == 0.0
        for near in (text[: math_text.FREE_LENGTH], text[: math_text.LONGEST_PARSED]):
            math_text.settled("4" * 150, near)
    assert time.monotonic() - started < 20.0
