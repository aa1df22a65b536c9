"""Whatever stands at any key of a recipe: a recipe of finite numbers that reads back as it was written, or one line."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.recipe import RecipeError, known_keys, make_recipe, resolved_yaml
from unit.test_recipe_numbers import BASE

KEYS = st.sampled_from(sorted(known_keys()))
NUMBERS = st.integers() | st.integers(-3, 9) | st.floats() | st.sampled_from([1e308, 5e-324, 10**400, -(10**30), 2**31])
WORDS = st.text("abé .-'", max_size=6)
SCALARS = NUMBERS | st.booleans() | st.none() | st.dates() | WORDS | NUMBERS.map(str)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3))


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, (int, float)):
        yield value


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
def test_any_values_make_a_recipe_of_finite_numbers_or_one_line(changes: dict[str, Any]) -> None:
    values = copy.deepcopy(BASE)
    for key, value in changes.items():
        place = values
        *path, last = key.split(".")
        for part in path:
            inner = place.setdefault(part, {})
            place = inner if isinstance(inner, dict) else place.update({part: {}}) or place[part]
        place[last] = value
    try:
        recipe = make_recipe(values, "here")
    except RecipeError as error:
        assert str(error).startswith("here: ") and "\n" not in str(error)
    else:
        assert all(map(math.isfinite, numbers_in(recipe.model_dump())))
        assert make_recipe(yaml.safe_load(resolved_yaml(recipe)), "again") == recipe
