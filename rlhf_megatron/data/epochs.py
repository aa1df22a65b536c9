"""The length of a run that is given in epochs, in steps of so many prompts."""

from __future__ import annotations

import os
from typing import TypeVar

from rlhf_megatron.data.prompt_columns import RESPONSES, open_columns
from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe import Recipe

RecipeT = TypeVar("RecipeT", bound=Recipe)


def in_steps(recipe: RecipeT, rows: float) -> RecipeT:
    """Return the recipe with ``steps`` for its epochs of so many training rows; without epochs, as it is.

    Raises RecipeError where another key contradicts that number.
    """
    try:
        return recipe.with_counted_steps(rows)
    except ValueError as error:
        raise RecipeError(f"epochs={recipe.epochs:g} of {rows:,.0f} rows: {error}") from error


def planned_in_steps(recipe: RecipeT) -> RecipeT:
    """Return ``in_steps`` by the files' row counts, of rows that are left out for their length too; as it is where
    a file is not on this machine.

    Raises DataError where a file cannot be read, and RecipeError as ``in_steps`` does.
    """
    section = recipe.data
    if recipe.epochs is None or not all(map(os.path.exists, section.training_files)):
        return recipe
    counts = (len(open_columns(part.files, section, RESPONSES[recipe.loop])) for part in section.parts)
    return in_steps(recipe, sum(counts) * (1 - section.validation_fraction))
