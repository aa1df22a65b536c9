"""The forecast of a cache against caches that are filled: lengths drawn, every step played."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rlhf_megatron.rollout.response_lengths import ResponseLengths, groups_that_fit

LONGEST, ROWS, PROMPT = 1000, 8, 40


def drawn(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    return np.clip(generator.lognormal(5.0, 0.8, count), 1, LONGEST).astype(np.int64)


def lengths_of(latest: NDArray[np.int64]) -> ResponseLengths:
    known, learned = latest[: len(latest) // 2].tolist(), latest[len(latest) // 2 :].tolist()
    lengths = ResponseLengths(known)
    for tokens in learned:
        lengths.learn(tokens)
    return lengths


def fullest(lengths: NDArray[np.int64], ages: NDArray[np.int64]) -> int:
    """Return tokens of all responses at the time when there are most of them; they begin with ``ages``."""
    return max(int((ages + t)[ages + t < lengths].sum()) for t in range(LONGEST))


def test_survival_is_the_share_of_longer_ones() -> None:
    survival = lengths_of(drawn(np.random.default_rng(1), 512)).survival(LONGEST)
    many = drawn(np.random.default_rng(2), 100_000)
    shares = [(many > t).mean() for t in range(LONGEST)]
    np.testing.assert_allclose(survival[:-1], shares, atol=0.06)
    assert survival[0] == 1.0 and survival[-1] == 0.0
    assert (np.diff(survival) < 0).all(), "a response may still end, however long it has become"


def test_nothing_known_is_any_length_alike() -> None:
    np.testing.assert_allclose(ResponseLengths().survival(10), np.linspace(1.0, 0.0, 11))


@pytest.mark.parametrize("begun", [0, 100])
def test_an_empty_cache_holds_as_many_groups_as_are_forecast(begun: int) -> None:
    generator = np.random.default_rng(3)
    free = 100_000
    latest = drawn(generator, 512)
    groups = groups_that_fit(lengths_of(latest).survival(LONGEST), free, [], PROMPT, ROWS, begun)
    longer = latest[latest > begun]
    assert groups > 1.2 * free / (PROMPT + ROWS * longer.mean()), "they end one by one"
    for share, fits in ((0.93, True), (1.07, False)):
        count = int(share * groups)
        lengths = generator.choice(longer, count * ROWS)
        assert (fullest(lengths, np.full(count * ROWS, begun)) + count * PROMPT <= free) == fits


def test_room_beside_what_runs() -> None:
    generator = np.random.default_rng(4)
    free, latest = 60_000, drawn(generator, 512)
    running = np.array([generator.integers(0, tokens) for tokens in generator.choice(latest, 200)])
    groups = groups_that_fit(lengths_of(latest).survival(LONGEST), free, running.tolist(), PROMPT, ROWS)
    of_running = np.array([generator.choice(latest[latest > age]) for age in running])
    for share, fits in ((0.9, True), (1.1, False)):
        count = int(share * groups)
        lengths = np.concatenate([of_running, generator.choice(latest, count * ROWS)])
        ages = np.concatenate([running, np.zeros(count * ROWS, dtype=np.int64)])
        assert (fullest(lengths, ages) + count * PROMPT <= free + running.sum()) == fits


def test_no_room_and_no_end_of_room() -> None:
    survival = ResponseLengths().survival(LONGEST)
    assert groups_that_fit(survival, 0.0, [], PROMPT, ROWS) == 0.0
    assert groups_that_fit(survival, 1000.0, [10] * 50, PROMPT, ROWS) == 0.0, "those that run will grow"
    assert groups_that_fit(survival, float("inf"), [10] * 50, PROMPT, ROWS) == float("inf")
