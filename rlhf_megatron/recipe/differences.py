"""Differences of plain recipes: keys and values of several runs, or of one run before and after a change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

# A run's own name and place: two runs never share them, and they change no result.
_NAMES = ("name", "run_root")


def differing_values(recipes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Return (key, the value of each) where plain recipes differ, but for names; None where one lacks the key."""
    if len(recipes) < 2:
        return []
    return [(key, values) for key, values in _differing(recipes, "") if key not in _NAMES]


def shown_value(value: Any) -> str:
    """Return a value as a recipe writes it, in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=math.inf, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _differing(values: Sequence[Any], key: str) -> list[tuple[str, list[Any]]]:
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(inner for value in values for inner in value)
        inside = [_differing([value.get(inner) for value in values], f"{key}.{inner}".strip(".")) for inner in keys]
        return [difference for of_key in inside for difference in of_key]
    return [(key, list(values))] if len({shown_value(value) for value in values}) > 1 else []
