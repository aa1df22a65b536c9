"""Any text becomes plain YAML values or one line, and any override of a sound recipe a recipe or one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.recipe import RecipeError, known_keys, load_recipe, resolved_yaml
from rlhf_megatron.recipe.plain_yaml import MOST_VALUES, parse_yaml, yaml_problem
from rlhf_megatron.untrusted import MOST_LEVELS, is_within_levels

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny_grpo.yaml"
FRAGMENTS = (
    "a: ", "b: ", "? ", "- ", "\n", "  ", "{", "}", "[", "]", ", ", "&a ", "*a", "&b ", "*b", "<<: ", "!!set ",
    "!!binary ", "!!python/tuple ", "2024-01-01", "1:30", "010", "0x" + "f" * 200, ".nan", "yes", "~", '"\\0"',
    "'", '"', "|", ">", "#", "---", "...", "%", "\x00", "\ufeff", "[" * 200, "é", "=",
)  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join) | st.text()


def values_in(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    assert not isinstance(value, dict) or all(isinstance(key, str) for key in value)
    assert isinstance(value, (dict, list, str, bool, int, float, type(None)))
    return 1 + sum(map(values_in, inner))


@given(texts)
def test_any_text_is_plain_values_or_one_line(text: str) -> None:
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        line = yaml_problem(error)
        assert line.isprintable() and 0 < len(line) < 500
    else:
        assert is_within_levels(value, MOST_LEVELS) and values_in(value) <= MOST_VALUES


@given(st.lists(st.builds("{}={}".format, st.sampled_from(list(known_keys())) | texts, texts) | texts, max_size=3))
def test_any_override_gives_a_recipe_or_one_line(overrides: list[str]) -> None:
    try:
        recipe = load_recipe(RECIPE, overrides)
    except RecipeError as error:
        assert str(error).isprintable() and len(str(error)) < 5000
    else:
        again = yaml.safe_load(resolved_yaml(recipe))
        assert again["name"] == recipe.name
