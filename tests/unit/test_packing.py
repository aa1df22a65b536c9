"""Micro-batches: every row once, none over its budget, all of about the same cost."""

from __future__ import annotations

import heapq
import itertools
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from rlhf_megatron.data.packing import assign_rows, plan_for_all, plan_micro_batches, row_costs


def whole_plan(
    lengths: list[int], budget: int, data: int, rows_together: int = 1, multiple: int = 1, attention: float = 0.0
) -> list[list[list[int]]]:
    """Return the micro-batches of all data-parallel ranks, as these agree on their number."""
    owner = assign_rows(torch.tensor(lengths, dtype=torch.int64), data, None, rows_together, attention)
    own = [(owner == rank).nonzero().flatten().tolist() for rank in range(data)]

    def plan_of(rank: int, at_least: int) -> list[list[int]]:
        of_rank = [lengths[row] for row in own[rank]]
        return plan_micro_batches(of_rank, budget, rows_together, multiple, attention, at_least)

    count = max(len(plan_of(rank, 1)) for rank in range(data))
    plans = [plan_for_all(lambda least, rank=rank: plan_of(rank, least), lambda _: count) for rank in range(data)]
    return [[[own[rank][row] for row in micro] for micro in plan] for rank, plan in enumerate(plans)]


lengths_of_rows = some.lists(some.integers(1, 300), max_size=60)


@given(lengths_of_rows, some.integers(1, 5), some.integers(1, 3), some.integers(100, 400))
def test_every_row_is_dealt_once_and_within_the_budget(
    lengths: list[int], data: int, multiple: int, budget: int
) -> None:
    plan = whole_plan(lengths, budget, data, multiple=multiple, attention=0.01)
    assert sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(plan))) == list(range(len(lengths)))
    assert len(plan) == data and len({len(of_rank) for of_rank in plan}) == 1 and len(plan[0]) % multiple == 0
    for micro in itertools.chain.from_iterable(plan):
        assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


@given(some.lists(some.integers(1, 99), min_size=2, max_size=40).filter(lambda rows: len(rows) % 2 == 0))
def test_rows_that_belong_together_stay_in_order(lengths: list[int]) -> None:
    for of_rank in whole_plan(lengths, 200, 2, rows_together=2):
        for micro in of_rank:
            assert all(b == a + 1 and a % 2 == 0 for a, b in zip(micro[::2], micro[1::2], strict=True))


def largest_differencing(costs: list[float], bins: int) -> float:
    """Return the largest sum by the method of Karmarkar and Karp (1982) for many bins."""
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
    plan = whole_plan(lengths, budget, data, attention=attention)
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
    plan = whole_plan(lengths, budget, data)
    assert len(plan[0]) == micro_batches
    for micro in itertools.chain.from_iterable(plan):
        assert len(micro) <= 1 or sum(lengths[row] for row in micro) <= budget


def test_a_token_of_a_long_row_counts_for_more() -> None:
    lengths = [800, 200, 200, 200, 200]
    assert whole_plan(lengths, 1000, 2) == [[[0]], [[1, 2, 3, 4]]]
    assert whole_plan(lengths, 5000, 2, attention=0.1) == [[[0]], [[1, 2, 3, 4]]]
    [[long], [short]] = whole_plan([*lengths, 400], 1200, 2, attention=0.01)
    assert 0 in long and len(long) == 1 and len(short) == 5


def test_ranks_get_as_much_of_each_part_and_of_the_whole() -> None:
    draw = random.Random(4)
    lengths = torch.tensor([1 + int(draw.lognormvariate(5, 0.8)) for _ in range(480)])
    parts = [torch.arange(first, first + 6) for first in range(0, 240, 6)] + [torch.arange(240, 400)]
    owner = assign_rows(lengths, 4, parts)
    assert (owner[400:] == -1).all(), "those of no part go nowhere"
    spent = torch.zeros(4).long().index_add(0, owner[:400], lengths[:400])
    assert int(spent.max()) <= 1.02 * float(spent.double().mean()), "however uneven parts of few rows are"
    for part in parts:
        of_part = torch.zeros(4).long().index_add(0, owner[part], lengths[part])
        assert int(of_part.max()) <= max(
            1.001 * largest_differencing(lengths[part].tolist(), 4), int(lengths[part].max())
        )


def test_half_a_million_rows_are_spread_evenly() -> None:
    lengths = torch.from_numpy(numpy.random.default_rng(1).lognormal(8, 0.8, 2**19).astype(numpy.int64) + 1)
    owner = assign_rows(lengths, 8192, attention=1e-5)
    costs = row_costs(lengths, 1e-5)
    spent = numpy.bincount(owner.numpy(), costs)
    assert spent.max() <= max(1.002 * spent.mean(), costs.max())
