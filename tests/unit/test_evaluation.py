"""pass@k, maj@k and their intervals against values worked out by hand and against all subsets, one by one."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.evaluation.estimates import (
    Answered,
    bootstrap_interval,
    evaluation_metrics,
    majority_at_k,
    pass_at_k,
    sample_counts,
)


def every_subset(n: int, k: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(n), k))


def vote(answers: Sequence[str | None], correct: Sequence[bool], voters: Sequence[int]) -> Fraction:
    """Return the share of right samples among all samples with a winning answer, averaged over equally frequent
    winners."""
    counts = Counter(answers[voter] for voter in voters if answers[voter] is not None)
    if not counts:
        return Fraction(0)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    worth = Fraction(0)
    for winner in winners:
        verdicts = [right for answer, right in zip(answers, correct, strict=True) if answer == winner]
        worth += Fraction(sum(verdicts), len(verdicts))
    return worth / len(winners)


def test_pass_at_k_of_hand_computed_cases() -> None:
    # Chen et al. 2021, eq. 1: 1 - C(n - c, k) / C(n, k).
    assert pass_at_k(4, 1, 2) == 0.5  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 - C(3,3)/C(5,3) = 1 - 1/10
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 0, 10) == 0.0
    assert pass_at_k(10, 1, 10) == pass_at_k(3, 2, 2) == 1.0  # fewer than k are wrong
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(1, n)))
)
def test_pass_at_k_is_the_mean_over_all_subsets(case: tuple[list[bool], int]) -> None:
    correct, k = case
    subsets = every_subset(len(correct), k)
    expected = Fraction(sum(any(correct[place] for place in subset) for subset in subsets), len(subsets))
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(float(expected), abs=1e-15)


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_impossible_counts_are_refused(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k} must be from 1 to the 4|{correct} of 4 samples cannot be right"):
        pass_at_k(samples, correct, k)


def test_majority_of_hand_computed_cases() -> None:
    answers, correct = ["a", "a", "b", "c"], [True, True, False, False]
    assert majority_at_k(answers, correct, 4) == 1.0
    # Pairs: aa wins; ab, ac (2 each) are ties of right and wrong; bc is wrong: (1 + 4 * 1/2) / 6.
    assert majority_at_k(answers, correct, 2) == pytest.approx(0.5)
    # Triples: aab and aac are won by a; abc (2 of them) is a tie of three: (2 + 2 * 1/3) / 4.
    assert majority_at_k(answers, correct, 3) == pytest.approx(2 / 3)
    assert majority_at_k(["b", "a", "b"], [False, True, False], 3) == 0.0
    assert majority_at_k([None, "a", None], [False, True, False], 3) == 1.0, "who is silent does not vote"
    assert majority_at_k([None, "a", None], [False, True, False], 2) == pytest.approx(2 / 3)
    assert majority_at_k([None, None], [True, True], 2) == 0.0
    assert majority_at_k(["a", "a"], [True, False], 2) == 0.5
    with pytest.raises(ValueError, match="2 answers but 1 verdicts"):
        majority_at_k(["a", "b"], [True], 1)


@settings(max_examples=200)
@given(
    st.integers(1, 8).flatmap(
        lambda n: st.tuples(
            st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=n, max_size=n),
            st.lists(st.booleans(), min_size=n, max_size=n),
            st.integers(1, n),
        )
    )
)
def test_majority_is_the_mean_over_all_subsets(case: tuple[list[str | None], list[bool], int]) -> None:
    answers, correct, k = case
    subsets = every_subset(len(answers), k)
    expected = sum((vote(answers, correct, subset) for subset in subsets), Fraction(0)) / len(subsets)
    assert majority_at_k(answers, correct, k) == pytest.approx(float(expected), abs=1e-14)


def test_a_large_vote_is_counted_exactly() -> None:
    draw = random.Random(1)
    answers = [str(draw.randrange(12)) for _ in range(64)]
    correct = [answer == "3" for answer in answers]
    voters = 16
    sampled = [vote(answers, correct, draw.sample(range(64), voters)) for _ in range(4000)]
    assert majority_at_k(answers, correct, voters) == pytest.approx(float(sum(sampled) / len(sampled)), abs=0.025)


def test_the_interval_is_the_same_for_a_seed_and_shrinks_with_more_questions() -> None:
    few, many = [0.0, 1.0] * 10, [0.0, 1.0] * 1000
    assert bootstrap_interval(few, 1) == bootstrap_interval(few, 1) != bootstrap_interval(few, 2)
    low, high = bootstrap_interval(many, 1)
    # Normal approximation: 0.5 -+ 1.96 * 0.5 / sqrt(2000) = 0.5 -+ 0.0219
    assert low == pytest.approx(0.5 - 0.0219, abs=0.004) and high == pytest.approx(0.5 + 0.0219, abs=0.004)
    assert bootstrap_interval([0.25], 1) == (0.25, 0.25)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.integers(0, 5))
def test_the_interval_lies_within_the_values(values: list[float], seed: int) -> None:
    low, high = bootstrap_interval(values, seed)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12


def test_the_numbers_of_samples_are_powers_of_two_and_all() -> None:
    assert [sample_counts(n) for n in (1, 2, 3, 8, 10)] == [[], [2], [2, 3], [2, 4, 8], [2, 4, 8, 10]]


def test_metrics_are_means_over_the_questions_of_each_source() -> None:
    questions = [
        Answered("b", (True, False, False, False), ("1", "2", "2", "3"), (1.0, 0.0, 0.0, 0.5)),
        Answered("a", (True, False), (None, None), (1.0, -1.0)),
        Answered("b", (True, True, True, False), ("5", "5", "5", None), (1.0, 1.0, 1.0, 0.0)),
    ]
    metrics = evaluation_metrics(questions, seed=3)
    assert list(metrics) == ["a", "b"]
    assert {name: estimate.value for name, estimate in metrics["b"].items()} == {
        "mean@4": 0.5,
        "pass@2": pytest.approx((0.5 + 1.0) / 2),
        "pass@4": 1.0,
        # Of the first question, pairs: 22 wrong, 12 (2) and 13 half, 23 (2) wrong: 1.5 / 6. Of the second, always 5.
        "maj@2": pytest.approx((0.25 + 1.0) / 2),
        "maj@4": 0.5,
        "score": pytest.approx((0.375 + 0.75) / 2),
    }
    assert list(metrics["a"]) == ["mean@2", "pass@2", "score"], "nobody votes"
    for estimate in metrics["b"].values():
        assert estimate.low <= estimate.value <= estimate.high
    with pytest.raises(ValueError, match="b: questions have from 2 to 4 samples"):
        evaluation_metrics([*questions, Answered("b", (True, False), ("1", "2"), (1.0, 0.0))], seed=3)
    assert evaluation_metrics([], seed=3) == {}
