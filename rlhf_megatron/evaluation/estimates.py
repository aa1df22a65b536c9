"""Estimates from several answers to each question: mean@k, pass@k, maj@k, and their standard errors. Pure functions.

Not here: generating and scoring the answers (generation/), and reading an answer out of a response (rewards/rules.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy

CONFIDENCE = 0.95
RESAMPLES = 1000


@dataclass(frozen=True)
class Answered:
    """One question and its n samples, in any order.

    Attributes:
        data_source: the question's group in the results.
        correct: [n], whether each sample is right.
        answers: [n], the final answer that each sample votes for; None where it has none and does not vote.
        scores: [n], each sample's score.
    """

    data_source: str
    correct: tuple[bool, ...]
    answers: tuple[str | None, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Estimate:
    """A mean over questions, and the bounds of its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return an unbiased estimate of the probability that at least one of k samples is right.

    Chen et al. 2021 (arXiv 2107.03374), eq. 1: 1 - C(n - c, k) / C(n, k), for n samples of which c are right. In whole
    numbers, so that it is exact but for the last rounding.

    Raises:
        ValueError: not 0 <= correct <= samples, or not 1 <= k <= samples.
    """
    _check(samples, k)
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} of {samples} samples cannot be right")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Return the expected correctness of the answer that most of k samples give, drawn from these without replacement.

    Self-consistency (Wang et al. 2022, arXiv 2203.11171) with the mean over all C(n, k) subsets in place of one draw.
    Equally frequent winners count equally. Samples without an answer do not vote; where none votes, that is wrong.

    Args:
        answers: [n], what each sample votes for, or None.
        correct: [n], whether each sample is right; an answer counts by the share of its samples that are.
        k: number of voters.

    Raises:
        ValueError: the lengths differ, or not 1 <= k <= n.
    """
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers but {len(correct)} verdicts")
    _check(len(answers), k)
    votes = Counter(answers)
    right = Counter(answer for answer, is_right in zip(answers, correct, strict=True) if is_right)
    silent = votes.pop(None, 0)
    return _majority(tuple(sorted((count, right[answer]) for answer, count in votes.items())), silent, k)


@lru_cache(maxsize=4096)
def _majority(votes: tuple[tuple[int, int], ...], silent: int, k: int) -> float:
    """Return ``majority_at_k`` for answers given by (samples, right samples), and so many silent samples.

    For each number of votes that may win, the subsets of size k in which no answer has more are counted, answer by
    answer, by size and number of winners, together with the sum of the winners' scores. All in whole numbers: scores
    are in units of 1 / unit.
    """
    unit = math.lcm(*(count for count, _ in votes))
    subsets = math.comb(silent + sum(count for count, _ in votes), k)
    total = 0.0
    for most in range(1, min(k, max((count for count, _ in votes), default=0)) + 1):
        ways = {(size, 0): (math.comb(silent, size), 0) for size in range(min(silent, k) + 1)}
        to_come = sum(min(count, most) for count, _ in votes)
        for count, right in votes:
            to_come -= min(count, most)
            score_of_win = right * (unit // count)
            grown: dict[tuple[int, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
            for (size, winners), (number, score) in ways.items():
                for taken in range(max(0, k - size - to_come), min(count, most, k - size) + 1):
                    wins, choices = taken == most, math.comb(count, taken)
                    key = (size + taken, winners + wins)
                    before = grown[key]
                    gained = score + score_of_win * number if wins else score
                    grown[key] = (before[0] + choices * number, before[1] + choices * gained)
            ways = grown
        total += sum(score / (winners * unit * subsets) for (_, winners), (_, score) in ways.items() if winners)
    return total


def bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the 95% percentile interval of the mean of values [P], over 1,000 resamples of the P questions (Efron
    1979); the same for the same values and seed."""
    numbers = numpy.asarray(values, numpy.float64)
    chosen = numpy.random.default_rng(seed).integers(len(numbers), size=(RESAMPLES, len(numbers)))
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = numpy.quantile(numbers[chosen].mean(axis=1), [tail, 1.0 - tail])
    return float(low), float(high)


def sample_counts(samples: int) -> list[int]:
    """Return the numbers k of pass@k and maj@k: powers of two from 2, and all samples. For 1 both are mean@n."""
    return sorted({2**power for power in range(1, samples.bit_length()) if 2**power < samples} | {samples} - {1})


def evaluation_metrics(answered: Sequence[Answered], seed: int) -> dict[str, dict[str, Estimate]]:
    """Return {data source: {metric: estimate}}, sources in alphabetical order.

    Metrics: mean@n (the share of right samples), pass@k and maj@k for the k of ``sample_counts``, and score (the mean
    score). n is the number of samples of each question, the same for all of a source. maj@k is left out for a source in
    which no sample has an answer.

    Args:
        answered: the questions of all sources.
        seed: of the bootstrap.

    Raises:
        ValueError: the questions of a source have different numbers of samples.
    """
    by_source: dict[str, list[Answered]] = defaultdict(list)
    for question in answered:
        by_source[question.data_source].append(question)
    return {
        source: {name: Estimate(math.fsum(values) / len(values), *bootstrap_interval(values, seed))
                 for name, values in _values(source, by_source[source]).items()}
        for source in sorted(by_source)
    }  # fmt: skip


def _values(source: str, questions: Sequence[Answered]) -> Mapping[str, list[float]]:
    """Return each metric's value for each question."""
    sizes = {len(question.correct) for question in questions}
    if len(sizes) > 1:
        raise ValueError(f"{source}: questions have from {min(sizes)} to {max(sizes)} samples instead of equally many")
    [samples] = sizes
    votes = any(answer is not None for question in questions for answer in question.answers)
    values = {f"mean@{samples}": [sum(question.correct) / samples for question in questions]}
    for k in sample_counts(samples):
        values[f"pass@{k}"] = [pass_at_k(samples, sum(question.correct), k) for question in questions]
    for k in sample_counts(samples) if votes else []:
        values[f"maj@{k}"] = [majority_at_k(question.answers, question.correct, k) for question in questions]
    values["score"] = [sum(question.scores) / samples for question in questions]
    return values


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be from 1 to the {samples} samples")
