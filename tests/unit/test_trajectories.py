"""Rows of one trajectory: one advantage and one weight, as if it were one row."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.algorithms.advantage import OF_ROWS, outcomes, row_advantages
from rlhf_megatron.algorithms.aggregation import row_weights
from rlhf_megatron.data.rollout_batch import batch_from_rows
from rlhf_megatron.data.row_numbers import RowNumbers, checked_numbers, from_table, numbers_of
from rlhf_megatron.data.shared_prompts import SharedPrefixes
from rlhf_megatron.recipe import AlgorithmSection

# Rows of trajectories 3, 3, 5, 7, 7, 7; two groups.
TRAJECTORY, GROUP, LENGTHS = [3, 3, 5, 7, 7, 7, 9], [0, 0, 0, 1, 1, 1, 1], [2, 4, 5, 1, 1, 2, 3]
REWARDS = [1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 0.5]
FIRST, WHOLE = [0, 2, 3, 6], [6, 5, 4, 3]


def numbers() -> RowNumbers:
    batch = batch_from_rows(
        [[1]] * 7, [[2] * size for size in LENGTHS], group_id=GROUP, trajectory_id=TRAJECTORY, rewards=REWARDS
    )
    return numbers_of(batch, 0)


def merged() -> RowNumbers:
    """Return the same trajectories as rows of all of their tokens."""
    batch = batch_from_rows(
        [[1]] * 4,
        [[2] * size for size in WHOLE],
        group_id=[GROUP[row] for row in FIRST],
        rewards=[REWARDS[row] for row in FIRST],
    )
    return numbers_of(batch, 0)


@pytest.mark.parametrize("name", sorted(set(OF_ROWS) - {"remax"}))
def test_a_trajectory_counts_once_among_those_of_its_group(name: str) -> None:
    settings = AlgorithmSection.model_validate({"advantage": name})
    penalties = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.0, 0.1, 0.0]).double()
    sums = torch.tensor([0.3, 0.0, 0.4, 0.0]).double()
    for of_rows, of_whole in ((None, None), (penalties, sums)):
        found = row_advantages(outcomes(numbers(), of_rows), settings)
        wanted = row_advantages(outcomes(merged(), of_whole), settings)
        assert found is not None and wanted is not None
        torch.testing.assert_close(found, wanted[torch.tensor([0, 0, 1, 2, 2, 2, 3])])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_a_trajectory_weighs_as_one_row_of_all_its_tokens(aggregation: str) -> None:
    found = row_weights(torch.tensor(LENGTHS), aggregation, trajectories=torch.tensor(TRAJECTORY))
    wanted = row_weights(torch.tensor(WHOLE), aggregation)
    assert found.tolist() == wanted[torch.tensor([0, 0, 1, 2, 2, 2, 3])].tolist()
    assert float((found * torch.tensor(LENGTHS)).sum()) == pytest.approx(float((wanted * torch.tensor(WHOLE)).sum()))


def test_rows_of_a_trajectory_follow_each_other_and_its_first_shares_the_prompt_of_the_group() -> None:
    rows = SharedPrefixes.of_numbers(numbers().select(torch.tensor([5, 2, 6, 0, 3, 1, 4])))
    assert rows.order.tolist() == [3, 5, 1, 0, 4, 6, 2], "by groups, then by trajectories"
    assert rows.shared.tolist() == [0, 1, 1, 0, 0, 0, 0], "numbers do not say what later rows share"
    assert rows.repeated == [1, 1] and rows.tokens(range(7)) == sum(LENGTHS) + 5
    assert SharedPrefixes.of_numbers(merged()).shared.tolist() == [0, 1, 0, 1]
    none = SharedPrefixes.of_numbers(numbers().select(torch.tensor([], dtype=torch.int64)))
    assert none.repeated == [] and none.assign(2).tolist() == []


def test_trajectories_go_with_their_rows() -> None:
    every = numbers()
    again = from_table(every.table())
    assert again.trajectory_id is not None and again.trajectory_id.tolist() == TRAJECTORY
    chosen = again.select(torch.tensor([False, True, True, False, True, True, True]))
    assert chosen.trajectories.tolist() == [0, 1, 2, 2, 3]
    assert chosen.of_trajectories().row_id.tolist() == [1, 2, 4, 6]
    fields = {name: value for name, value in vars(every).items() if value is not None}
    assert checked_numbers(fields).trajectory_id is not None
    assert from_table(merged().table()).trajectory_id is None and merged().of_trajectories().rows == 4
