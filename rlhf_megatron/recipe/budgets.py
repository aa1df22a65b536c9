"""Budgets of a recipe that a run may choose or lower: tokens of micro-batches, memory of the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from rlhf_megatron.recipe.load import make_recipe
from rlhf_megatron.recipe.recipe import Recipe

AnyOfRecipes = TypeVar("AnyOfRecipes", bound=Recipe)


def open_budgets(recipe: Recipe) -> list[str]:
    """Return the keys (section.name) of micro-batches that the recipe leaves to the plan: ``tokens_per_gpu: auto``."""
    own = {name: section for name, section in recipe.roles.items() if name in type(recipe).model_fields}
    return [f"{name}.tokens_per_gpu" for name, section in own.items() if section.tokens_per_gpu == "auto"]


def with_budgets(recipe: AnyOfRecipes, budgets: Mapping[str, float]) -> AnyOfRecipes:
    """Return the recipe with smaller values at these keys (section.name), where it still has them; any number is
    smaller than auto."""
    values = recipe.model_dump()
    for key, value in budgets.items():
        section, name = key.split(".")
        known = values.get(section)
        if isinstance(known, dict) and name in known and (known[name] in (None, "auto") or value < known[name]):
            known[name] = value
    return cast(AnyOfRecipes, make_recipe(values, "budgets")) if budgets else recipe
