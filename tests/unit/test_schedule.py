"""Which steps a run evaluates, exports and saves, the metric that it keeps its best checkpoint by, and its replicas."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_megatron.checkpoint.best_metric import BestMetric
from rlhf_megatron.generation.replica import Replica, replica_of
from rlhf_megatron.loops.schedule import evaluation_is_due, export_is_due, save_is_due
from rlhf_megatron.recipe import RLRecipe
from rlhf_megatron.recipe.operations import KeepBestSection

RECIPE: dict[str, Any] = {
    "name": "scheduled",
    "loop": "rl",
    "steps": 7,
    "model": {"path": "model", "dtype": "float32"},
    "data": {"train_files": ["train.parquet"], "validation_files": ["held_out.parquet"], "max_prompt_length": 8},
    "batch": {"prompts_per_step": 4, "responses_per_prompt": 2},
    "actor": {"tokens_per_gpu": 64, "optimizer": {"learning_rate": 1e-3}},
    "reference": None,
    "rollout": {"max_response_length": 10},
    "algorithm": {"kl_coef": 0.0},
}


def recipe_of(**sections: Any) -> RLRecipe:
    return RLRecipe(**{**RECIPE, **sections})


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"interval": 3, "at_start": True, "at_end": True}, [0, 3, 6, 7]),
        ({"interval": 3, "at_start": False, "at_end": False}, [3, 6]),
        ({"interval": 7, "at_start": False, "at_end": False}, [7]),
        ({"interval": 0, "at_start": True, "at_end": False}, [0]),
        ({"interval": 0, "at_start": False, "at_end": True}, [7]),
    ],
)
def test_evaluations(section: dict[str, Any], expected: list[int]) -> None:
    recipe = recipe_of(evaluation=section)
    assert [step for step in range(8) if evaluation_is_due(recipe, step)] == expected


@pytest.mark.parametrize(("interval", "expected"), [(0, []), (2, [2, 4, 6]), (7, [])])
def test_exports_in_between_leave_the_last_step_to_the_end(interval: int, expected: list[int]) -> None:
    recipe = recipe_of(checkpoint={"export_interval": interval})
    assert [step for step in range(1, 8) if export_is_due(recipe, step)] == expected


@pytest.mark.parametrize(("interval", "expected"), [(0, []), (3, [3, 6, 7]), (7, [7])])
def test_saves_end_with_the_last_step(interval: int, expected: list[int]) -> None:
    recipe = recipe_of(checkpoint={"save_interval": interval})
    assert [step for step in range(1, 8) if save_is_due(recipe, step, is_skipped=False)] == expected
    skipped = [step for step in range(1, 8) if save_is_due(recipe, step, is_skipped=True)]
    assert skipped == [step for step in expected if step == 7]


def test_the_best_metric_is_the_mean_of_all_that_fit() -> None:
    best = BestMetric(KeepBestSection(metric="eval/*/accuracy"))
    best.observe(2, {"eval/a/accuracy": 0.5, "eval/b/accuracy": 1.0, "eval/a/score": 9.0})
    best.observe(2, {"train/loss": 3.0})
    best.observe(4, {"eval/a/score": 9.0})
    assert (best.value(2), best.value(4)) == (0.75, None)
    assert (best.missing(2), best.missing(4)) == (None, "eval/*/accuracy")


def test_without_a_section_no_metric_is_missing() -> None:
    best = BestMetric(None)
    best.observe(2, {"eval/a/accuracy": 0.5})
    assert (best.value(2), best.missing(2)) == (None, None)


def test_replicas_are_neighbours_and_the_first_rank_leads() -> None:
    recipe = recipe_of(rollout={"max_response_length": 10, "layout": {"tensor": 2}, "ranks": "2-5"})
    ranks = [2, 3, 4, 5]
    expected = [(None, 0), (None, 0), (0, 0), (0, 1), (1, 0), (1, 1), (None, 0)]
    replicas = [replica_of(recipe, rank, 7) for rank in range(7)]
    assert replicas == [Replica(ranks, 2, index, position, 2) for index, position in expected]
    assert [replica.leads for replica in replicas] == [False, False, True, False, True, False, False]


def test_each_response_is_kept_by_one_rank_of_its_replica_and_each_keeps_as_many() -> None:
    ranks = [Replica(list(range(8)), 2, 1, position, 4) for position in range(4)]
    for responses in (1, 3, 4):
        kept = [
            [rank.keeps(group, number) for group in range(1, 17, 2) for number in range(responses)] for rank in ranks
        ]
        assert all(sum(of_row) == 1 for of_row in zip(*kept, strict=True))
        assert {sum(of_rank) for of_rank in kept} == {2 * responses}
