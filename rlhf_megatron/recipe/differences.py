"""Differences of plain recipes: keys and values of several runs, or of one run before and after a change."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

# A run's own name and place: two runs never share them, and they change no result.
_NAMES = ("name", "run_root")
# A model of the hub lies in the cache of each machine; its name and commit say which it is.
_SNAPSHOT = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})")


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
    named = [_with_hub_name(value) for value in values]
    return [(key, named)] if len({shown_value(value) for value in named}) > 1 else []


def _with_hub_name(value: Any) -> Any:
    """Return OWNER/NAME@COMMIT for a folder of the hub's cache, and other values as they are."""
    match = _SNAPSHOT.fullmatch(value) if isinstance(value, str) else None
    return value if match is None else f"{match[1]}/{match[2]}@{match[3]}"
