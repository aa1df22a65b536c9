"""Reads a recipe: YAML with overlays and overrides into a checked Recipe, and back into YAML."""

from __future__ import annotations

import difflib
import io
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.recipe import Recipe
from rlhf_megatron.redaction import HIDDEN


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at ``path`` with ``key.path=value`` overrides; raises RecipeError in one line for each thing wrong.

    ``defaults:`` in a file lists other files, relative to it, that it is laid over, the later over the earlier.
    """
    values = _read_with_defaults(Path(path), ())
    for override in overrides:
        apply_override(values, override)
    return make_recipe(values, str(path))


def make_recipe(values: dict[str, Any], where: str) -> Recipe:
    """Checks plain values; ``where`` names their source in errors."""
    unknown = list(_unknown_keys(values, Recipe, ""))
    if unknown:
        raise RecipeError(f"{where}: " + "; ".join(unknown))
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: " + "; ".join(_complaint(item) for item in error.errors())) from error
    for key in _hidden_keys(recipe.model_dump(mode="json"), ""):
        raise RecipeError(f"{where}: {key} is {HIDDEN}, as a run's records hide a secret; write the value itself")
    return recipe


def _hidden_keys(value: Any, key: str) -> Iterator[str]:
    """The keys with a hidden value: a run's own recipe.yaml would otherwise be taken for what the run was made from."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _hidden_keys(inner, f"{key}.{name}".strip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _hidden_keys(inner, key)
    elif isinstance(value, str) and (value == HIDDEN or f"://{HIDDEN}@" in value):
        yield key


def resolved_yaml(recipe: Recipe, hide: Callable[[Any], Any] = dict) -> str:
    """The recipe with every value written out, less what ``hide`` takes away; loading it gives the same recipe."""
    text: str = yaml.safe_dump(hide(recipe.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
    return text


def _complaint(item: Any) -> str:
    """One of pydantic's errors as "key: what is wrong; what it is"."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"{key}: missing; add it"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] != "value_error" and not isinstance(item["input"], dict):
        message += f"; it is {item['input']!r}"
    return f"{key}: {message}" if key else message


def _read_with_defaults(path: Path, parents: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in parents:
        circle = " -> ".join(parent.name for parent in (*parents[parents.index(path.resolve()) :], path))
        raise RecipeError(f"{path}: its defaults lead back to itself ({circle}); take it out of one of them")
    values = _read_yaml(path)
    merged: dict[str, Any] = {}
    overlays = values.pop("defaults", [])
    if not isinstance(overlays, list) or not all(isinstance(name, str) for name in overlays):
        raise RecipeError(f"{path}: defaults must be a list of files, such as [overlays/dapo.yaml]; it is {overlays!r}")
    for name in overlays:
        _merge(merged, _read_with_defaults(path.parent / name, (*parents, path.resolve())))
    _merge(merged, values)
    return merged


def _read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in one file; raises RecipeError naming the line of a mistake in it."""
    try:
        values = _load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}); recipes are in recipes/") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not a text file in UTF-8; recipes are in recipes/") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = ", ".join(part for part in (error.problem, error.context) if part)
        raise RecipeError(f"{path}: not valid YAML: {line}{reason}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path}: must be a mapping of sections such as `model:` and `data:`, see recipes/")
    return values


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which would take the last of two equal keys without a word, and which lets errors of Python
    through where a value only looks like a date or a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Raises ConstructorError for a value such as 2024-13-45."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            reason = f"{node.value!r} cannot be read as {kind}; quote it if it is text"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raises ConstructorError at the second of two equal keys."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # refused below, since such a key cannot be looked up
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands here a second time", key_node.start_mark
                )
            seen.add(key_node.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _load_yaml(text: str) -> Any:
    loader = _Loader(io.StringIO(text))
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def apply_override(values: dict[str, Any], override: str) -> None:
    """Puts the value of a ``key.path=value`` into a recipe's plain values; raises RecipeError where it has no place."""
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise RecipeError(f"override {override!r}: must have the form key.path=value, such as steps=10")
    try:
        value = _load_yaml(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"override {override!r}: the value is not valid YAML; quote it") from error
    *path, last = key.split(".")
    place = values
    for part in path:
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise RecipeError(f"override {override!r}: {part} is {place!r} and has no keys below it")
    place[last] = value


def _unknown_keys(values: dict[str, Any], section: type[BaseModel], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        if key not in section.model_fields:
            yield f"unknown key {prefix}{key}{_suggestion(f'{prefix}{key}', prefix, section)}"
            continue
        inner = section_of(section.model_fields[key].annotation)
        for part in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(part, dict):
                yield from _unknown_keys(part, inner, f"{prefix}{key}.")


def _suggestion(full_key: str, prefix: str, section: type[BaseModel]) -> str:
    """The nearest key of the same section; failing that, the same or a near name anywhere in a recipe."""
    name = full_key.rsplit(".", 1)[-1]
    here = difflib.get_close_matches(name, list(section.model_fields), 1, 0.6)
    if here:
        return f"; did you mean {prefix}{here[0]}?"
    everywhere = {key.rsplit(".", 1)[-1]: key for key in known_keys()}
    near = difflib.get_close_matches(name, list(everywhere), 1, 0.7)
    return f"; did you mean {everywhere[near[0]]}?" if near else f"; known keys here: {', '.join(section.model_fields)}"


def known_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Every key of a recipe with its full path, sections before their fields."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class in ``X``, ``X | None`` or ``list[X]``."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, list):
        return next((found for arg in typing.get_args(annotation) if (found := section_of(arg))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
