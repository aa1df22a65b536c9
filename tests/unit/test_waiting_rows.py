"""Rows that wait come back from the files of the ranks that held them, whatever ranks there are then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_megatron.data.rollout_batch import RolloutBatch, batch_from_rows
from rlhf_megatron.data.row_numbers import SpreadRows, numbers_of
from rlhf_megatron.generation.waiting_rows import RowsReader, held_tensors, rows_state

HOLDERS = [4, 0, 4, 7, 0, 4]


def rows_of(ids: list[int]) -> RolloutBatch:
    return batch_from_rows(
        [[n, n] for n in ids],
        [[n] * (n + 1) for n in ids],
        [[-n / 4] * (n + 1) for n in ids],
        row_id=ids,
        group_id=[n // 2 for n in ids],
        rewards=[n / 2 for n in ids],
    )


def saved() -> tuple[dict[str, Any], dict[int, dict[str, torch.Tensor]]]:
    """Return the state of six rows on three ranks, and what each of these has in its file."""
    numbers = numbers_of(rows_of(list(range(6))), torch.tensor(HOLDERS))
    spread = {
        rank: SpreadRows(numbers, rows_of([row for row, holder in enumerate(HOLDERS) if holder == rank]), rank)
        for rank in (0, 3, 4, 7)
    }
    return rows_state(spread[0]), {rank: held_tensors(rows, "ahead") for rank, rows in spread.items()}


def read(ranks: list[int], rank: int, files: dict[int, dict[str, torch.Tensor]], state: dict[str, Any]) -> SpreadRows:
    def own(holder: int, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(f"{prefix}/"): value for name, value in files[holder].items()}

    return RowsReader(ranks, rank, 100, None).read(state, own, "ahead")


@pytest.mark.parametrize("ranks", [[0], [5, 2], [0, 1, 2], [0, 1, 2, 3, 4, 5]])
def test_rows_come_back_on_any_ranks(ranks: list[int]) -> None:
    state, files = saved()
    assert not files[3], "a rank without rows has nothing to write"
    held = []
    for rank in [*ranks, 9]:
        found = read(ranks, rank, files, state)
        here = found.here()
        places = (found.numbers.holder == rank).nonzero().squeeze(1)
        assert here.row_id.tolist() == places.tolist(), "in the order of the numbers"
        wanted = rows_of(places.tolist())
        for name in ("tokens", "cu_seqlens", "response_mask", "rollout_logprobs", "rewards", "group_id"):
            assert torch.equal(getattr(here, name), getattr(wanted, name))
        held += here.row_id.tolist()
    assert sorted(held) == list(range(6))


def test_rows_of_one_batch_are_read_as_they_were_saved_before() -> None:
    batch = rows_of(list(range(6)))
    fields = {name: value for name, value in vars(batch).items() if value is not None}
    found = [read([3, 1], rank, {}, fields) for rank in (3, 1)]
    assert [rows.here().row_id.tolist() for rows in found] == [[0, 1, 4, 5], [2, 3]]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("response_mask", torch.zeros(33, dtype=torch.bool), "other tokens than their numbers say"),
        ("tokens", torch.full((33,), 100), "beyond the vocabulary"),
        ("tokens", torch.zeros(32, dtype=torch.int64), "not one for 32 values"),
    ],
)
def test_rows_that_do_not_belong_to_their_numbers_are_refused(name: str, value: torch.Tensor, problem: str) -> None:
    state, files = saved()
    state["holder"] = torch.zeros(6, dtype=torch.int64)
    whole = rows_of(list(range(6)))
    fields = {"tokens": whole.tokens, "response_mask": whole.response_mask, "rollout_logprobs": whole.rollout_logprobs}
    files[0] = {f"ahead/{key}": each for key, each in fields.items()} | {f"ahead/{name}": value}
    with pytest.raises(ValueError, match=problem):
        read([0], 0, files, state)


@pytest.mark.parametrize(
    ("name", "value"),
    [("holder", torch.full((6,), -1)), ("lengths", torch.zeros(6, dtype=torch.int64)), ("rewards", torch.zeros(5))],
)
def test_numbers_that_are_none_are_refused(name: str, value: torch.Tensor) -> None:
    state, files = saved()
    with pytest.raises(ValueError, match="rows"):
        read([0], 0, files, state | {name: value})
