"""RolloutBatch: rows chosen, counted and brought together, against lists."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from numbered_rows import as_lists, numbered_rows
from rlhf_megatron.data.expert_choices import ChoiceShape, is_known, merged
from rlhf_megatron.data.rollout_batch import (
    RolloutBatch,
    batch_from_rows,
    checked_batch,
    concatenate,
    marked_in_rows,
    on_tokens,
)


def rows_of(ids: list[int]) -> RolloutBatch:
    return numbered_rows(ids).with_fields(scores=torch.tensor([n / 8 for n in ids]))


@pytest.mark.parametrize("chosen", [[], [3], [9, 0, 4], [0, 1], list(range(9, -1, -1)), [2, 2]])
def test_chosen_rows_are_as_if_there_were_no_others(chosen: list[int]) -> None:
    ids = list(range(10))
    random.Random(1).shuffle(ids)
    assert as_lists(rows_of(ids).select(chosen)) == as_lists(rows_of([ids[place] for place in chosen]))


def test_what_is_counted_and_spread_over_rows_without_tokens_too() -> None:
    rows = [[True, False, True], [], [False], [True], []]
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.tensor(list(itertools.chain(*rows)))
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths.tolist())])
    assert marked_in_rows(mask, cu_seqlens).tolist() == [2, 0, 0, 1, 0]
    assert on_tokens(torch.tensor([1.5, 2.5, 3.5, 4.5, 5.5]), lengths).tolist() == [1.5, 1.5, 1.5, 3.5, 4.5]


def test_a_rows_value_is_on_its_sampled_tokens_alone() -> None:
    found = rows_of([2, 0, 1]).spread(torch.tensor([0.5, torch.inf, -2.0]))
    assert found.tolist() == [0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, -2.0]


def fields_of(batch: RolloutBatch) -> dict[str, Any]:
    return {name: value for name, value in vars(batch).items() if value is not None}


SOUND = batch_from_rows([[1, 2], [3]], [[4], [5, 6]], [[-0.5], [-0.25, -1.0]], rewards=[0.0, 1.0])


def test_a_batch_that_was_saved_is_read() -> None:
    assert checked_batch(fields_of(SOUND), 7).lengths.tolist() == [3, 3]


@pytest.mark.parametrize("experts", [4, 256])
def test_expert_choices_stay_with_their_rows(experts: int) -> None:
    shape = ChoiceShape(experts, layers=2, chosen=1)
    given = torch.tensor([[[row], [experts - 1]] for row in range(2)], dtype=shape.dtype)
    batch = batch_from_rows([[1, 2], [3]], [[4], [5, 6]], expert_choices=[given, None], choices=shape)
    assert batch.expert_choices is not None and batch.expert_choices.dtype == shape.dtype
    assert is_known(batch.expert_choices).tolist() == [True, True, False, False, False, False]
    turned = concatenate([batch, batch]).select([3, 2]).expert_choices
    assert turned is not None and torch.equal(turned[3:], batch.expert_choices[:3]) and not is_known(turned[:3]).any()
    whole = merged(given, shape.of_rows([4], [torch.zeros(3, 2, 1, dtype=shape.dtype)]))
    assert whole is not None and torch.equal(whole[:2], given), "those that a token was sampled by"
    assert whole[2].tolist() == [[0], [0]] and is_known(whole).tolist() == [True, True, True, False]
    read = checked_batch(fields_of(batch), 7, shape)
    assert read.expert_choices is batch.expert_choices
    assert checked_batch(fields_of(batch), 7).expert_choices is None, "they are not replayed now"
    missing = checked_batch(fields_of(SOUND), 7, shape).expert_choices
    assert missing is not None and not is_known(missing).any(), "they were not recorded then"
    with pytest.raises(ValueError, match=f"expert choices are beyond the model's {experts} experts"):
        checked_batch(fields_of(batch) | {"expert_choices": batch.expert_choices - 1}, 7, shape)
    with pytest.raises(ValueError, match="expert choices are a tensor of"):
        checked_batch(fields_of(batch) | {"expert_choices": batch.expert_choices[:5]}, 7, shape)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", torch.tensor([1, 2, 4, 3, 5, 7])),
        ("tokens", torch.tensor([1, 2, 4, 3, 5, -1])),
        ("tokens", torch.zeros(6)),
        ("tokens", torch.zeros(5, dtype=torch.int64)),
        ("tokens", torch.zeros(2, 3, dtype=torch.int64)),
        ("cu_seqlens", torch.tensor([0, 3, 7])),
        ("cu_seqlens", torch.tensor([1, 3, 6])),
        ("cu_seqlens", torch.tensor([0, 6, 6])),
        ("cu_seqlens", torch.tensor([0, 6])),
        ("cu_seqlens", torch.tensor(0)),
        ("response_mask", torch.zeros(6)),
        ("rollout_logprobs", torch.full([6], math.nan)),
        ("rewards", torch.tensor([0.0, math.inf])),
        ("rewards", torch.tensor([0.0])),
        ("rewards", 5),
        ("row_id", None),
        ("advantages", torch.zeros(2)),
        ("other", torch.zeros(2)),
    ],
)
def test_a_batch_that_was_damaged_is_none(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        checked_batch(fields_of(SOUND) | {name: value}, 7)
