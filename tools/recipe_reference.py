"""Writes docs/recipes.md, the reference of all recipe keys, from the schema; with --check it only compares.

    python tools/recipe_reference.py [--check]

Here: the layout of the page. Keys, defaults and their texts stand in rlhf_megatron/recipe/.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rlhf_megatron.errors import UserError
from rlhf_megatron.recipe import Recipe, RLRecipe
from rlhf_megatron.recipe.load import RECIPES, section_of
from rlhf_megatron.recipe.recipe import READING_ORDER
from rlhf_megatron.runtime.command import ArgumentParser, command

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipes.md"
HEADER = """# Recipes

A recipe is one YAML file that decides a run: `launch/train.py RECIPE [key.path=value ...]`. Unknown keys are errors.
`defaults: [FILE, ...]` lays a file over others (paths relative to it; later ones win, the file itself wins over all).
Paths of models, data and runs are relative to the folder in which the command runs.
`--dry-run --world N` prints the resolved recipe, the layouts and an estimate of memory, without a GPU.

The recipes in `recipes/` are complete examples; `recipes/overlays/` holds what several share, and `recipes/models/`
the config.json of models for planning before their weights are here.

This page is made by `python tools/recipe_reference.py` from the schema in `rlhf_megatron/recipe/`.
"""


def page() -> str:
    """The whole page as Markdown."""
    return "\n".join([HEADER, *_loop_lines(), *_section_lines(RLRecipe, "", {})])


def _loop_lines() -> Iterator[str]:
    """The lines about the keys that each loop reads."""
    yield "## What each loop reads\n"
    yield "The tables below are those of loop `rl`. The other loops refuse what they do not read:\n"
    yield "| loop | top-level keys beside those of all loops | of `batch` | of `algorithm` |\n|---|---|---|---|"
    for loop, kind in RECIPES.items():
        own = [f"`{key}`" for key in READING_ORDER if key in kind.model_fields and key not in Recipe.model_fields]
        cells = [f"`{loop}`", ", ".join(own) or "none"]
        for key in ("batch", "algorithm"):
            inner = section_of(kind.model_fields[key].annotation) if key in kind.model_fields else None
            keys = "all" if loop == "rl" else ", ".join(f"`{name}`" for name in inner.model_fields) if inner else "none"
            cells.append(keys)
        yield f"| {' | '.join(cells)} |"
    yield ""


def _section_lines(section: type[BaseModel], path: str, seen: dict[type[BaseModel], str]) -> Iterator[str]:
    """A heading and a table for one section, then its inner sections; a class in ``seen`` gets a link to its table."""
    if section in seen:
        yield f"## {path}\n\nThe same keys as [{seen[section]}]({_anchor(seen[section])}).\n"
        return
    seen[section] = path
    if path:
        yield f"## {path}\n\n{' '.join((section.__doc__ or '').split())}\n"
    else:
        yield "## The top level\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    inner = []
    fields = section.model_fields if path else {key: section.model_fields[key] for key in READING_ORDER}
    for name, field in fields.items():
        key = f"{path}.{name}" if path else name
        inner_section = section_of(field.annotation)
        if inner_section is not None:
            inner.append((inner_section, key))
        kind, text = _type_name(field.annotation, key), _text(field)
        if key == "loop":
            kind, text = ", ".join(f"`{loop}`" for loop in RECIPES), _text(Recipe.model_fields["loop"])
        yield f"| `{name}` | {kind} | {_default(field)} | {text} |"
    yield ""
    for inner_section, key in inner:
        yield from _section_lines(inner_section, key, seen)


def _anchor(key: str) -> str:
    return "#" + key.replace(".", "")


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return ""
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return f"`{text}`"


def _type_name(annotation: Any, key: str) -> str:
    """A type as a user writes it: the names of a Literal, a number, a list, or a link to a section."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(part, key) for part in arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0], key)}"
    if origin is typing.Annotated:  # with bounds
        return _type_name(arguments[0], key)
    if origin is dict:
        return "mapping"
    if annotation is type(None):
        return "`null`"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[section]({_anchor(key)})"
    return {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}[annotation]


@command
def main() -> int:
    """Returns 1 if --check finds the page out of date."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    check = parser.parse_args().check
    text = page()
    if not check:
        try:
            PAGE.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{PAGE}: cannot be written ({error.strerror})") from error
        print(f"{PAGE}: written")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"error: {PAGE} is out of date; run python tools/recipe_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
