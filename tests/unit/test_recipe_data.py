"""rlhf_megatron.recipe.data: what the keys of the data section make of each other."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_megatron.recipe import Recipe, RecipeError, make_recipe

PARTS = [{"name": "sums", "files": ["a", "b"], "weight": 3}, {"name": "words", "files": ["c"], "weight": 1}]


def recipe(data: dict[str, Any], **values: Any) -> Recipe:
    base = {
        "name": "x",
        "loop": "sft",
        "steps": 1,
        "model": {"path": "m", "dtype": "float32"},
        "batch": {"prompts_per_step": 1},
    }
    base["actor"] = {"tokens_per_gpu": 9, "optimizer": {"learning_rate": 1e-5}}
    return make_recipe({**base, "data": {"max_prompt_length": 9, **data}, **values}, "recipe.yaml")


def test_training_files_are_one_part_or_a_mixture() -> None:
    plain = recipe({"train_files": ["a", "b"]}).data
    assert plain.training_files == ["a", "b"]
    assert [(part.files, part.weight) for part in plain.parts] == [(["a", "b"], 1.0)]
    mixed = recipe({"mixture": PARTS}).data
    assert mixed.training_files == ["a", "b", "c"]
    assert [(part.name, part.weight) for part in mixed.parts] == [("sums", 3.0), ("words", 1.0)]


def test_held_out_rows_can_be_evaluated_on() -> None:
    assert not recipe({"train_files": ["a"]}).data.evaluates
    for data in ({"validation_files": ["v"]}, {"validation_fraction": 0.1}):
        assert recipe({"train_files": ["a"], **data}, evaluation={"interval": 5}).data.evaluates


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({}, "data: train_files: there is nothing to train on; name parquet files, or give a mixture"),
        ({"train_files": ["a"], "mixture": PARTS}, "data: mixture: train_files are given too; name each file in one"),
        ({"mixture": [PARTS[0], PARTS[0]]}, "data: mixture: two parts have the name 'sums'; give each its own"),
        ({"mixture": [{**PARTS[0], "weight": 0}]}, "data.mixture.0.weight: Input should be greater than 0; it is 0"),
        (
            {"mixture": [{**PARTS[0], "wheight": 1}]},
            "unknown key data.mixture.wheight; did you mean data.mixture.weight",
        ),
        (
            {"train_files": ["a"], "validation_files": ["v"], "validation_fraction": 0.1},
            "data: validation_fraction=0.1: validation_files are given too; leave one out",
        ),
        ({"train_files": ["a"], "validation_fraction": 1.0}, "data.validation_fraction: Input should be less than 1"),
        (
            {"train_files": ["a"], "min_prompt_length": 10},
            "min_prompt_length=10 is above max_prompt_length=9; lower it",
        ),
        (
            {"train_files": ["a"], "shuffle": False, "curriculum": {"column": "c", "bands": 3}},
            "data: curriculum.bands: rows are shuffled within bands, which shuffle=false forbids; leave one out",
        ),
        (
            {"train_files": ["a"], "curriculum": {"column": "c", "order": "up"}},
            "data.curriculum.order: Input should be 'ascending' or 'descending'; it is 'up'",
        ),
        (
            {"train_files": ["a"], "chat_template_kwargs": {"tokenize": True}},
            "data: chat_template_kwargs: tokenize is given by the program; leave it out",
        ),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line(data: dict[str, Any], told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(data)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_given_responses_have_a_limit_here() -> None:
    data = {"train_files": ["a"], "max_response_length": 5}
    assert recipe(data).data.max_response_length == 5
    rollout = {"max_response_length": 5, "kv_cache_gb": 1}
    batch = {"prompts_per_step": 1, "responses_per_prompt": 2}
    with pytest.raises(RecipeError, match=r"data\.max_response_length=5: rl learns no given responses; set rollout\."):
        recipe(data, loop="rl", rollout=rollout, batch=batch)
