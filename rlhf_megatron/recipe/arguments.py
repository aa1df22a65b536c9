"""The arguments RECIPE and key.path=value of commands, and what a shell completes them to."""

from __future__ import annotations

import argparse
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_megatron.recipe.load import known_keys, section_of
from rlhf_megatron.recipe.rl_recipe import RLRecipe
from rlhf_megatron.shipped import shipped_recipes


def add_recipe_arguments(
    parser: argparse.ArgumentParser, more: str = "", overrides: str = "replace a value of the recipe"
) -> None:
    """Add RECIPE and its overrides to a command's arguments; ``more`` goes behind the help of RECIPE."""
    recipe = parser.add_argument("recipe", help=f"a YAML file, or the name of a recipe that comes along{more}")
    changes = parser.add_argument("overrides", nargs="*", metavar="key.path=value", help=overrides)
    recipe.completer = complete_recipe  # type: ignore[attr-defined]
    changes.completer = complete_override  # type: ignore[attr-defined]


def complete_recipe(prefix: str, **_: Any) -> list[str]:
    """Return YAML files and folders, and names of shipped recipes, that begin with ``prefix``."""
    folder, _separator, beginning = prefix.rpartition("/")
    matches = sorted(Path(folder or ("/" if _separator else ".")).glob(f"{beginning}*")) if "*" not in prefix else []
    here = f"{folder}{_separator}"
    files = [f"{here}{path.name}" for path in matches if path.suffix in (".yaml", ".yml") and path.name[0] != "."]
    folders = [f"{here}{path.name}/" for path in matches if path.is_dir() and path.name[0] != "."]
    return [*files, *folders, *(path.stem for path in shipped_recipes() if path.stem.startswith(prefix))]


def complete_override(prefix: str, **_: Any) -> list[str]:
    """Return keys of recipes with "=" behind them, or what a key with few values can be."""
    key, separator, _value = prefix.partition("=")
    if separator:
        return [f"{key}={choice}" for choice in choices_of(key)]
    return [f"{known}=" for known in known_keys() if known.startswith(prefix) and not _is_section(known)]


def choices_of(key: str) -> list[str]:
    """Return the values of a key that has few, as YAML writes them; none of an unknown key."""
    return _choices(_annotation_of(key))


def _is_section(key: str) -> bool:
    return section_of(_annotation_of(key)) is not None


def _annotation_of(key: str) -> Any:
    """Return the type of a key's values; None of an unknown key."""
    section: type[BaseModel] | None = RLRecipe
    annotation: Any = None
    for name in key.split("."):
        field = section.model_fields.get(name) if section else None
        if field is None:
            return None
        annotation = field.annotation
        section = section_of(annotation)
    return annotation


def _choices(annotation: Any) -> list[str]:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        return ["true", "false"]
    if origin is typing.Literal:
        return [str(part).lower() if isinstance(part, bool) else str(part) for part in parts]
    if origin in (types.UnionType, typing.Union):
        return [choice for part in parts for choice in _choices(part)]
    return ["null"] if annotation is types.NoneType else []
