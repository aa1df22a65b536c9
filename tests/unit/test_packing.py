"""Micro-batches: every row once, none over its budget, all of about the same cost."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rlhf_megatron.data.packing import imbalance, plan_micro_batches

lengths_of_rows = some.lists(some.integers(1, 300), max_size=60)


@given(lengths_of_rows, some.integers(1, 5), some.integers(1, 3), some.integers(100, 400))
def test_every_row_is_dealt_once_and_within_the_budget(
    lengths: list[int], data: int, multiple: int, budget: int
) -> None:
    plan = plan_micro_batches(lengths, budget, data, multiple=multiple, attention=0.01)
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(plan))) == list(range(len(lengths)))
    assert len(plan) == data and len({len(of_rank) for of_rank in plan}) == 1 and len(plan[0]) % multiple == 0
    for micro in itertools.chain.from_iterable(plan):
        assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


@given(some.lists(some.integers(1, 99), min_size=2, max_size=40).filter(lambda rows: len(rows) % 2 == 0))
def test_rows_that_belong_together_stay_in_order(lengths: list[int]) -> None:
    for of_rank in plan_micro_batches(lengths, 200, 2, rows_together=2):
        for micro in of_rank:
            assert all(b == a + 1 and a % 2 == 0 for a, b in zip(micro[::2], micro[1::2], strict=True))


def largest_differencing(costs: list[float], bins: int) -> float:
    """The largest sum by the method of Karmarkar and Karp (1982) for many bins."""
    number = itertools.count()
    heap = [(-cost, next(number), [0.0] * (bins - 1) + [cost]) for cost in costs]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = sorted(a + b for a, b in zip(one, reversed(other), strict=True))
        heapq.heappush(heap, (both[0] - both[-1], next(number), both))
    return heap[0][2][-1]


@pytest.mark.parametrize(("rows", "data", "seed"), [(64, 4, 1), (256, 8, 2), (512, 32, 3)])
def test_costs_are_as_near_to_each_other_as_by_largest_differencing(rows: int, data: int, seed: int) -> None:
    draw, attention = random.Random(seed), 1e-3
    lengths = [1 + int(draw.lognormvariate(5, 0.8)) for _ in range(rows)]
    costs = [n + attention * n * n for n in lengths]
    budget = max(max(lengths), sum(lengths) // (data * 2) + max(lengths))
    plan = plan_micro_batches(lengths, budget, data, attention=attention)
    spent = [sum(costs[row] for micro in of_rank for row in micro) for of_rank in plan]
    assert max(spent) <= largest_differencing(costs, data) * 1.001
    for of_rank in plan:
        cost = max(sum(costs[row] for row in micro) for micro in of_rank)
        rows_of_rank = [costs[row] for micro in of_rank for row in micro]
        assert cost <= largest_differencing(rows_of_rank, len(of_rank)) * 1.05


@pytest.mark.parametrize(
    ("lengths", "budget", "data", "micro_batches"),
    [([2000] * 4, 500, 1, 4), ([20000] * 4 + [100] * 4, 500, 2, 3), ([16000] * 8 + [3000] * 24, 8192, 4, 5)],
)
def test_rows_over_the_budget_take_a_micro_batch_each_and_no_empty_ones(
    lengths: list[int], budget: int, data: int, micro_batches: int
) -> None:
    plan = plan_micro_batches(lengths, budget, data)
    assert len(plan[0]) == micro_batches
    for micro in itertools.chain.from_iterable(plan):
        assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


def test_a_token_of_a_long_row_counts_for_more() -> None:
    lengths = [800, 200, 200, 200, 200]
    assert plan_micro_batches(lengths, 1000, 2) == [[[0]], [[1, 2, 3, 4]]]
    assert plan_micro_batches(lengths, 5000, 2, attention=0.1) == [[[0]], [[1, 2, 3, 4]]]
    [[long], [short]] = plan_micro_batches([*lengths, 400], 1200, 2, attention=0.01)
    assert 0 in long and len(long) == 1 and len(short) == 5


def test_imbalance_is_the_dearest_over_the_mean() -> None:
    lengths, plan = [3, 1, 2, 2], [[[0], [1]], [[2, 3], []]]
    # n + n^2: rows cost 12, 2, 6, 6; ranks 14 and 12; micro-batches 12, 2, 12, 0.
    assert imbalance(plan, lengths, attention=1.0) == pytest.approx(
        {"imbalance": 14 / 13, "imbalance_micro_batch": 12 / 6.5}
    )
    assert imbalance([[[0], [1]], [[3], [2]]], [5, 5, 5, 5])["imbalance"] == 1.0
