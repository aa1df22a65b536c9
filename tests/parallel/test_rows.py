"""Rows go from the rank that holds them to those that compute them, whole, once, whatever the layouts are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from numbered_rows import as_lists, numbered_rows
from parallel.ranks import run_ranks
from rlhf_megatron.data.expert_choices import ChoiceShape
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.data.row_numbers import SpreadRows, joined
from rlhf_megatron.roles.shares import Home, carried, share_out
from rlhf_megatron.topology import row_exchange
from rlhf_megatron.topology.row_exchange import RowExchangeError, gather_rows

HELD = [[4, 0, 7], [], [6, 1, 9, 3], [8, 5, 2]]  # rows of each rank
CHOICES = ChoiceShape(experts=300, layers=2, chosen=1)


def rows_of(ids: list[int]) -> RolloutBatch:
    return numbered_rows(
        ids,
        expert_choices=[torch.full((n, 2, 1), n, dtype=torch.int16) for n in ids],
        choices=CHOICES,
    )


def move() -> dict[str, Any]:
    """Return two homes of two data-parallel ranks: ranks 0 and 1, 2 and 3; and ranks 3 and 1."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rows = gather_rows(rows_of(HELD[rank]))
    pairs = Home(("pairs",), (0, 2), rank // 2, groups[rank // 2])
    alone = Home(("alone",), (3, 1), {3: 0, 1: 1}.get(rank))
    owner, other = torch.arange(10) % 2, torch.tensor([1, 1, -1, 0, 0, 1, 1, 0, 0, 1])
    first, second = share_out(rows, [(pairs, owner), (alone, other)])
    values = second.batch.tokens / 8 if alone.data is not None else None
    target = Home(("pairs",), pairs.leaders, pairs.data, pairs.group)
    kept = share_out(rows, [(target, torch.where(other < 0, other, owner))])[0]
    came = carried(values, second, kept)
    assert came is not None and torch.equal(came, kept.batch.tokens / 8), "a value of each token follows its row"
    return {
        "numbers": rows.numbers.table().tolist(),
        "held": as_lists(rows.held),
        "pairs": as_lists(first.batch),
        "alone": as_lists(second.batch),
    }


def test_rows_come_to_all_ranks_of_their_home() -> None:
    found = run_ranks(move, 4)
    assert all(each["numbers"] == found[0]["numbers"] for each in found)
    assert [numbers[0] for numbers in found[0]["numbers"]] == list(range(10))
    assert [as_lists(rows_of(sorted(ids))) for ids in HELD] == [each["held"] for each in found]
    for rank, each in enumerate(found):
        assert each["pairs"] == as_lists(rows_of([n for n in range(10) if n % 2 == rank // 2]))
        of_alone = {3: [3, 4, 7, 8], 1: [0, 1, 5, 6, 9]}.get(rank, [])
        assert each["alone"] == as_lists(rows_of(of_alone))


def mix_up() -> str:
    """Have rank 0 send another row than it should, and then one whose mask is another."""
    rank, problems = dist.get_rank(), []
    rows = gather_rows(rows_of([3, 5] if rank == 0 else []))
    home = Home((), (1,), 0 if rank == 1 else None)
    spoiled = rows.held.with_fields(response_mask=torch.zeros_like(rows.held.response_mask))
    ids = rows.numbers.with_fields(row_id=torch.tensor([3, 6])) if rank == 0 else rows.numbers
    for sent in (SpreadRows(ids, rows.held, rank), SpreadRows(rows.numbers, spoiled, rank)):
        try:
            share_out(sent, [(home, torch.zeros(2, dtype=torch.int64))])
        except RowExchangeError as error:
            problems.append(str(error))
    return "; ".join(problems)


def test_a_row_that_arrives_wrong_is_named() -> None:
    _, told = run_ranks(mix_up, 2)
    assert told == (
        "row 5 of 8 tokens should come from rank 0, and row 6 of 8 came; "
        "row 3 came with another number of sampled tokens than 3"
    )


def test_rows_are_chosen_and_joined_with_their_numbers() -> None:
    whole = rows_of(list(range(6)))
    parts = [row_exchange.SpreadRows(row_exchange.numbers_of(whole, 0), whole, 0) for _ in range(2)]
    chosen = joined(parts).select(torch.arange(12) % 5 == 0)
    assert chosen.numbers.row_id.tolist() == chosen.held.row_id.tolist() == [0, 5, 4]
    assert chosen.held.tokens.tolist() == rows_of([0, 5, 4]).tokens.tolist()
    scored = parts[0].with_fields(scores=parts[0].numbers.rewards)
    with pytest.raises(ValueError, match="different fields"):
        joined([scored, parts[1]])
