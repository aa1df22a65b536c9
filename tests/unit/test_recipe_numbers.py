"""Every number of a recipe is finite, of a size that its uses bear, and given as a number."""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rlhf_megatron.recipe import RecipeError, RLRecipe, load_recipe, make_recipe, resolved_yaml
from rlhf_megatron.recipe.load import section_of

NAN, INF = math.nan, math.inf
NUMBERS = (int, float)
# Enough of each section for the rest of it to be looked at.
BASE: dict[str, Any] = {
    "name": "numbers",
    "loop": "rl",
    "steps": 3,
    "model": {"path": "somewhere", "dtype": "bfloat16"},
    "data": {"train_files": ["a.parquet"], "max_prompt_length": 100},
    "batch": {"prompts_per_step": 8, "responses_per_prompt": 4},
    "actor": {"tokens_per_gpu": 1000, "optimizer": {"learning_rate": 1e-4}},
    "rollout": {"max_response_length": 50},
}


def kinds(annotation: Any) -> set[Any]:
    """Return the classes that a field's annotation is made of, without those of sections."""
    if section_of(annotation) is not None:
        return set()
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return {type(choice) for choice in inner}
    return set().union(*map(kinds, inner)) if inner else {annotation}


def fields(section: type[BaseModel] = RLRecipe, path: str = "") -> Iterator[tuple[type[BaseModel], str, str]]:
    """Yield (section, field's name, its full key) of every field of the schema that takes numbers, also within
    lists."""
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from fields(inner, f"{path}{name}.")
        elif kinds(field.annotation).intersection(NUMBERS):
            yield section, name, path + name


FIELDS = list(fields())


def complaints(section: type[BaseModel], name: str, value: Any) -> list[str]:
    """Return what is said of a field alone, where it has this value."""
    annotation = section.model_fields[name].annotation
    given = [value] if typing.get_origin(annotation) is list else value
    try:
        section.model_validate({name: given})
    except ValidationError as error:
        return [str(item["msg"]) for item in error.errors() if item["loc"] and item["loc"][0] == name]
    return []


def refusal(override: str, tmp_path: Path) -> str:
    """Return the one line that a recipe with an override, in YAML, is refused with."""
    path = tmp_path / "recipe.yaml"
    path.write_text(resolved_yaml(make_recipe(BASE, "base")))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, [override])
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_the_walk_meets_all_sections() -> None:
    keys = {key for *_, key in FIELDS}
    assert len(keys) > 150
    assert {
        "steps",
        "health.rules.value",
        "monitor.profile.ranks",
        "rollout.steps_ahead",
        "data.mixture.weight",
    } <= keys


@pytest.mark.parametrize("value", [NAN, INF, -INF, "nan", "inf", "-Infinity", "1e999", 10**400], ids=str)
def test_no_field_takes_what_is_not_finite(value: Any) -> None:
    assert [key for section, name, key in FIELDS if not complaints(section, name, value)] == []


@pytest.mark.parametrize("value", [True, False])
def test_no_number_is_given_as_a_truth_value(value: bool) -> None:
    assert [key for section, name, key in FIELDS if not complaints(section, name, value)] == []


@pytest.mark.parametrize("value", [10**30, -(10**30), 2**32])
def test_no_whole_number_is_beyond_32_bits(value: int) -> None:
    whole = [field for field in FIELDS if float not in kinds(field[0].model_fields[field[1]].annotation)]
    assert [key for section, name, key in whole if not complaints(section, name, value)] == []


@pytest.mark.parametrize("value", [1.5, "1e3", "ten", None, [1], {"a": 1}], ids=str)
def test_a_whole_number_is_one(value: Any) -> None:
    whole = [field for field in FIELDS if kinds(field[0].model_fields[field[1]].annotation) == {int}]
    assert len(whole) > 60
    assert [key for section, name, key in whole if not complaints(section, name, value)] == []


@pytest.mark.parametrize("value", [1e39, -1e39, 1e308, 5e-324, 1e-39])
def test_no_number_overflows_or_vanishes_in_float32(value: float) -> None:
    assert [key for section, name, key in FIELDS if not complaints(section, name, value)] == []


def test_only_what_has_a_meaning_below_0_is_below_0() -> None:
    signed = {key.rpartition(".")[2] for section, name, key in FIELDS if not complaints(section, name, -1)}
    # Factors and thresholds of what has a sign, and the value by which top_k is off.
    assert signed == {"weight", "low", "high", "entropy_coef", "correct_from", "value", "top_k", "unparsable_score"}
    assert complaints(RLRecipe, "seed", -1), "NumPy's generators take no seed below 0"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.optimizer.learning_rate=.inf", "learning_rate: Input should be a finite number; it is inf"),
        ("actor.optimizer.learning_rate=1.0e+38", "Adam's first step, learning_rate / (1 - beta1), is beyond float32"),
        ("actor.optimizer.weight_decay=.nan", "actor.optimizer.weight_decay: Input should be a finite number"),
        ("health.rules=[{metric: a, when: above, value: .nan}]", "health.rules.0.value: Input should be a finite"),
        ("retry.hang_seconds=.inf", "retry.hang_seconds: Input should be a finite number; it is inf"),
        ("retry.hang_seconds=1.0e+12", "retry.hang_seconds: Input should be less than or equal to 315360000"),
        ("reward.timeout_seconds=1.0e+12", "reward.timeout_seconds: Input should be less than or equal to 315360000"),
        ("steps=true", "steps: must be a number; it is true"),
        ("rollout.steps_ahead=true", "rollout.steps_ahead: must be a number; it is true"),
        ("monitor.profile.ranks=[0, true]", "monitor.profile.ranks: must be a number; it is true"),
        ("monitor.profile.ranks=[-1]", "monitor.profile.ranks.0: Input should be greater than or equal to 0"),
        ("monitor.timeline.steps=[-1]", "monitor.timeline.steps.0: Input should be greater than or equal to 0"),
        ("steps=1000000000000000000000000000000", "steps: must be a number of 32 bits, up to 4294967295; it is 1000"),
        ("rollout.temperature=0.001", "rollout: temperature=0.001 must be 0.01 or more"),
        ("evaluation.temperature=0.001", "evaluation: temperature=0.001 must be 0, or 0.01 or more"),
        ("data.chat_template_kwargs={a: .nan}", "data.chat_template_kwargs.a.float: Input should be a finite number"),
        ("data.chat_template_kwargs={a: [{b: -.inf}]}", "b.float: Input should be a finite number; it is -inf"),
        ("data.chat_template_kwargs={a: 2024-01-01}", "'2024-01-01' cannot be read as timestamp"),
        ("data.chat_template_kwargs={a: &a [*a]}", "the alias a leads back to itself"),
    ],
)
def test_nonsense_is_refused_in_one_line(tmp_path: Path, override: str, expected: str) -> None:
    assert re.search(re.escape(expected), refusal(override, tmp_path))


@pytest.mark.parametrize(
    "override",
    [
        "seed=0",
        "seed=4294967295",
        "seed=3735928559",
        "actor.optimizer.learning_rate=1e-6",
        "actor.optimizer.epsilon=1.0e-15",
        "actor.optimizer={learning_rate: 1, beta1: 0, beta2: 0, weight_decay: 0, clip_grad: 0}",
        "evaluation.temperature=0",
        "rollout.temperature=0.01",
        "health.rules=[{metric: a, when: below, value: -1000}]",
        "algorithm.clip_ratio_high=10000",
        "checkpoint.save_interval=999999999",
        "data.chat_template_kwargs={enable_thinking: false, budget: 10, share: 0.5, names: [a, null]}",
        "retry.hang_seconds=0",
        "slurm.time_limit_hours=720",
    ],
)
def test_what_has_a_meaning_is_taken(tmp_path: Path, override: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(resolved_yaml(make_recipe(BASE, "base")))
    recipe = load_recipe(path, [override])
    path.write_text(resolved_yaml(recipe))
    assert load_recipe(path) == recipe
