"""Reads a recipe: YAML with overlays and overrides into a checked Recipe, and back into YAML."""

from __future__ import annotations

import difflib
import itertools
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.evaluation_recipe import EvaluationRecipe
from rlhf_megatron.recipe.other_names import WITHOUT_SENSE, name_here
from rlhf_megatron.recipe.plain_yaml import parse_yaml, yaml_problem
from rlhf_megatron.recipe.recipe import READING_ORDER, Recipe
from rlhf_megatron.recipe.rl_recipe import RLRecipe
from rlhf_megatron.recipe.rollout_recipe import RolloutRecipe
from rlhf_megatron.recipe.supervised import RewardModelingRecipe, SFTRecipe
from rlhf_megatron.redaction import HIDDEN
from rlhf_megatron.shipped import recipe_file, shipped_recipes
from rlhf_megatron.untrusted import MOST_LEVELS, is_within_levels, read_bytes, reason_of, shown

# Far beyond any recipe that a person or a program writes on purpose: of one file, and files with all their overlays.
_MOST_BYTES = 2**20
_MOST_FILES = 64
_MOST_COMPLAINTS = 16
_LONGEST_KEY = 100  # beyond it, no key that is meant is looked for
# All other texts of a recipe are names, paths and addresses, which have one line and something in it.
_FREE_TEXT = frozenset(["system_prompt", "pattern"])
_MOST_CHARACTERS = 4096  # of a path in Linux
_GENERATING = ("rollout", "reward")  # the sections that an evaluation reads beside those of all loops
AnyKind = TypeVar("AnyKind", bound=Recipe)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # tabs and line breaks are odd, and can be seen
_OF_A_SHELL = re.compile(r"~/|\$\{|\$\w+/")


AnyRecipe = RLRecipe | SFTRecipe | RewardModelingRecipe
RECIPES: dict[str, type[AnyRecipe]] = {"rl": RLRecipe, "sft": SFTRecipe, "reward_modeling": RewardModelingRecipe}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Return the recipe at ``path`` with ``key.path=value`` overrides; raises RecipeError in one line.

    ``path`` may be the name of a shipped recipe. ``defaults:`` in a file lists others, relative to it or shipped, that
    it is laid over, the later over the earlier.
    """
    return make_recipe(_read(path, overrides), str(path))


def frozen_yaml(path: str | Path) -> str:
    """Return the recipe at ``path``, with its overlays, as the text of one file to which overrides can be given as to
    it; raises RecipeError in one line where it cannot be read."""
    text: str = yaml.safe_dump(_read(path, ()), sort_keys=False, allow_unicode=True)
    return text


def load_rl(path: str | Path, overrides: Sequence[str] = ()) -> RLRecipe:
    """Return the recipe at ``path``; raises RecipeError also where its loop is not rl."""
    return require_rl(load_recipe(path, overrides))


def require_rl(recipe: Recipe) -> RLRecipe:
    """Return ``recipe`` if its loop is rl; raises RecipeError for another."""
    if not isinstance(recipe, RLRecipe):
        raise RecipeError(f"loop={recipe.loop}: this is for recipes of reinforcement learning; use one of loop rl")
    return recipe


def load_evaluation(path: str | Path, overrides: Sequence[str] = ()) -> RolloutRecipe:
    """Return what an evaluation reads of the recipe at ``path``, which may be of any loop; raises RecipeError."""
    values = _read(path, overrides)
    if values.get("loop") == "rl" or values.get("loop") not in RECIPES:
        return require_rl(make_recipe(values, str(path)))
    generating = {key: values.pop(key) for key in _GENERATING if key in values}
    common = make_recipe(values, str(path)).model_dump(include=set(EvaluationRecipe.model_fields))
    common["batch"] = {"prompts_per_step": common["batch"]["prompts_per_step"]}
    return _validated(common | generating, EvaluationRecipe, str(path))


def make_recipe(values: dict[str, Any], where: str) -> AnyRecipe:
    """Return the recipe of plain values; ``where`` names their source in errors."""
    if not is_within_levels(values):
        raise RecipeError(f"{shown(where)}: is nested too deeply; at most {MOST_LEVELS} levels are read")
    loop = values.get("loop")
    if not isinstance(loop, str) or loop not in RECIPES:
        problems = [*_problems(values, RLRecipe, ""), _wrong_loop(values)]
        raise RecipeError(_complaints(where, problems[: _MOST_COMPLAINTS + 1]))
    values, unread = _without_unread(values, RECIPES[loop], RLRecipe, loop, "")
    recipe = _validated(values, RECIPES[loop], where, unread)
    for key in _hidden_keys(recipe.model_dump(mode="json"), ""):
        raise RecipeError(
            f"{shown(where)}: {key} is {HIDDEN}, as a run's records hide a secret; write the value itself"
        )
    return recipe


def _wrong_loop(values: dict[str, Any]) -> str:
    if "loop" not in values:
        return "loop: missing; add it"
    return f"loop: Input should be 'rl', 'sft' or 'reward_modeling'; it is {shown(repr(values['loop']))}"


def _validated(values: dict[str, Any], kind: type[AnyKind], where: str, problems: Sequence[str] = ()) -> AnyKind:
    missing = [f"{key}: {text}" for key, text in kind.needed.items() if values.get(key) is None]
    complaints = [*problems, *missing, *itertools.islice(_problems(values, kind, ""), _MOST_COMPLAINTS + 1)]
    if len(complaints) > _MOST_COMPLAINTS:
        raise RecipeError(_complaints(where, complaints))
    try:
        recipe = kind.model_validate(values)
    except ValidationError as error:
        complaints += _further(error, complaints)
        raise RecipeError(_complaints(where, complaints)) from error
    if complaints:
        raise RecipeError(_complaints(where, complaints))
    return recipe


def _further(error: ValidationError, complaints: Sequence[str]) -> list[str]:
    """Return other errors than ``complaints``: not that a key is unknown, or missing where one is meant to be it."""
    said, further = "; ".join(complaints), list[str]()
    for item in error.errors(include_url=False)[: 2 * _MOST_COMPLAINTS]:
        complaint = _complaint(item)
        key = complaint.partition(": ")[0]
        is_told = any(each.startswith(f"{key}: ") for each in complaints) or f"did you mean {key}?" in said
        if item["type"] != "extra_forbidden" and not is_told:
            further.append(complaint)
    return further


def _without_unread(
    values: dict[str, Any], section: type[BaseModel], of_rl: type[BaseModel], loop: str, prefix: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the values without those keys of rl that ``loop`` does not read, and a problem for each that is set.

    Overlays and resolved recipes write out the defaults of keys that their loop does not read; these are dropped.
    """
    kept, problems = dict[str, Any](), list[str]()
    for key, value in values.items():
        field, own = of_rl.model_fields.get(key), section.model_fields.get(key)
        if own is None and field is not None:
            if not _is_default(value, field):
                advice = ", or give it to launch/evaluate.py as an override" if key in _GENERATING else ""
                problems.append(f"{prefix}{key}: loop {loop} does not read it; leave it out{advice}")
            continue
        inner, inner_of_rl = (section_of(each.annotation) if each else None for each in (own, field))
        if isinstance(value, dict) and inner and inner_of_rl and inner is not inner_of_rl:
            value, more = _without_unread(value, inner, inner_of_rl, loop, f"{prefix}{key}.")
            problems += more
        kept[key] = value
    return kept, problems


def _is_default(value: Any, field: FieldInfo) -> bool:
    """Return whether a plain value is what an absent key means; null is, of a section that rl cannot do without."""
    if value is None:
        return field.default is None or field.is_required()
    if isinstance(field.default, BaseModel) and isinstance(value, dict):
        try:
            return bool(type(field.default).model_validate(value) == field.default)
        except ValidationError:
            return False
    return type(value) is type(field.default) and bool(value == field.default)


def _read(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    values = _read_with_defaults(recipe_file(path), (), itertools.count(1))
    for override in overrides:
        apply_override(values, override)
    return values


def _hidden_keys(value: Any, key: str) -> Iterator[str]:
    """Yield the keys with a hidden value: a run's own recipe.yaml would otherwise be taken for what the run was made
    from."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _hidden_keys(inner, f"{key}.{name}".strip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _hidden_keys(inner, key)
    elif isinstance(value, str) and (value == HIDDEN or f"://{HIDDEN}@" in value):
        yield key


def resolved_yaml(recipe: Recipe, hide: Callable[[Any], Any] = dict) -> str:
    """Return the recipe with every value written out, less what ``hide`` takes away; loading it gives the same recipe.

    Sections come in the order in which the reference describes them.
    """
    values = recipe.model_dump(mode="json")
    ordered = {key: values[key] for key in READING_ORDER if key in values}
    text: str = yaml.safe_dump(hide(ordered), sort_keys=False, allow_unicode=True)
    return text


def _complaints(where: str, problems: Sequence[str]) -> str:
    """Return one line of the first problems; there may be one more than are shown."""
    more = "; and more" if len(problems) > _MOST_COMPLAINTS else ""
    return f"{shown(where)}: " + "; ".join(problems[:_MOST_COMPLAINTS]) + more


def _complaint(item: Any) -> str:
    """Return one of pydantic's errors as "key: what is wrong; what it is"."""
    key = shown(".".join(str(part) for part in item["loc"]))
    if item["type"] == "missing":
        return f"{key}: missing; add it"
    message = shown(str(item["msg"]).removeprefix("Value error, "), 1000)
    if item["type"] == "model_type":
        message = "must be a section, which is a mapping of keys"
    if item["type"] != "value_error" and not isinstance(item["input"], dict):
        message += f"; it is {shown(repr(item['input']))}"
    return f"{key}: {message}" if key else message


def _read_with_defaults(path: Path, parents: tuple[Path, ...], files: Iterator[int]) -> dict[str, Any]:
    """Return the values of a file over those of its overlays; ``files`` counts all files that are read."""
    if next(files) > _MOST_FILES:
        raise RecipeError(
            f"{shown(path)}: with all defaults of defaults there are more than {_MOST_FILES} files; merge"
        )
    values = _read_yaml(path)
    real = path.resolve()
    if real in parents:
        circle = " -> ".join(parent.name for parent in (*parents[parents.index(real) :], path))
        line = f"its defaults lead back to itself ({shown(circle)}); take it out of one of them"
        raise RecipeError(f"{shown(path)}: {line}")
    merged: dict[str, Any] = {}
    overlays = values.pop("defaults", [])
    if not isinstance(overlays, list) or not all(isinstance(name, str) and name for name in overlays):
        raise RecipeError(
            f"{shown(path)}: defaults must be a list of files, such as [overlays/dapo.yaml]; it is "
            f"{shown(repr(overlays))}"
        )
    for name in overlays:
        _merge(merged, _read_with_defaults(recipe_file(name, path.parent), (*parents, real), files))
    _merge(merged, values)
    return merged


def _other_recipe(path: Path) -> str:
    """Return what to give instead of a recipe that is not there."""
    near = difflib.get_close_matches(path.name.removesuffix(".yaml"), [file.stem for file in shipped_recipes()], 1)
    return f"did you mean {near[0]}?" if near else "give a file, or a name that `rlhf-megatron recipes` lists"


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in one file; raises RecipeError naming the line of a mistake in it."""
    try:
        os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a character that no name can have
        raise RecipeError(f"{shown(path)}: cannot be read ({reason_of(error)}); {_other_recipe(path)}") from error
    try:
        values = parse_yaml(read_bytes(path, RecipeError, _MOST_BYTES).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{shown(path)}: not a text file in UTF-8; recipes are in recipes/") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{shown(path)}: not valid YAML: {yaml_problem(error)}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{shown(path)}: must be a mapping of sections such as `model:` and `data:`, see recipes/")
    return values


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def apply_override(values: dict[str, Any], override: str) -> None:
    """Put the value of a ``key.path=value`` into a recipe's plain values; raises RecipeError where it has no place."""
    key, separator, text = override.partition("=")
    said = f"override {shown(repr(override))}"
    *path, last = key.split(".")
    if not separator or not all((*path, last)):
        raise RecipeError(f"{said}: must have the form key.path=value, such as steps=10")
    if len(path) >= MOST_LEVELS:
        raise RecipeError(f"{said}: the key is nested too deeply")
    if len(text) > _MOST_BYTES:
        raise RecipeError(f"{said}: the value has more than {_MOST_BYTES:,} characters")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{said}: the value is not valid YAML; quote it ({yaml_problem(error)})") from error
    target = values
    for part in path:
        if target.get(part) is None:
            target[part] = {}
        target = target[part]
        if not isinstance(target, dict):
            raise RecipeError(f"{said}: {shown(part)} is {shown(repr(target))} and has no keys below it")
    target[last] = value


def _problems(values: dict[str, Any], section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Yield problems that pydantic would tell in other words, or not at all: unknown keys, and values of a wrong
    kind."""
    for key, value in values.items():
        if key not in section.model_fields:
            yield f"unknown key {prefix}{shown(key)}{_suggestion(str(key), prefix, section)}"
            continue
        annotation = section.model_fields[key].annotation
        inner = section_of(annotation)
        for part in value if isinstance(value, list) else [value]:
            if inner is not None and isinstance(part, dict):
                yield from _problems(part, inner, f"{prefix}{key}.")
            elif isinstance(part, bool) and _wants_number(annotation):
                yield f"{prefix}{key}: must be a number; it is {str(part).lower()}"
            elif isinstance(part, str) and key not in _FREE_TEXT and (problem := _problem_of_text(part)):
                yield f"{prefix}{key}: {problem}"


def _problem_of_text(text: str) -> str | None:
    """Return the problem of a text that is no name, path or address; None where it may be one."""
    if not text.strip():
        return "is empty; give a value, or leave the key out"
    if len(text) > _MOST_CHARACTERS:
        return f"has {len(text):,} characters; at most {_MOST_CHARACTERS:,} can be a name or a path"
    if _OF_A_SHELL.match(text):
        return f"{shown(text, 80)}: only a shell knows what {text.partition('/')[0]} is; write out the whole path"
    control = _CONTROL.search(text)
    return f"has the control character {control[0]!r}; take it out; it is {shown(repr(text), 80)}" if control else None


def _suggestion(name: str, prefix: str, section: type[BaseModel]) -> str:
    """Return the nearest key of the same section; failing that, the same or a near name anywhere in a recipe."""
    name = name[:_LONGEST_KEY]
    if name in WITHOUT_SENSE:
        return f": {WITHOUT_SENSE[name]}"
    known = list(known_keys())
    if other := name_here(name, prefix, known):
        return f"; it is {other} here"
    here = difflib.get_close_matches(name, list(section.model_fields), 1, 0.6)
    if here:
        return f"; did you mean {prefix}{here[0]}?"
    # Of several, the one in the fewest sections; of several roles, the first.
    everywhere = {key.rsplit(".", 1)[-1]: key for key in sorted(reversed(known), key=lambda key: -key.count("."))}
    near = difflib.get_close_matches(name, list(everywhere), 1, 0.7)
    return f"; did you mean {everywhere[near[0]]}?" if near else f"; known keys here: {', '.join(section.model_fields)}"


def _wants_number(annotation: Any) -> bool:
    """Return whether a type is a number, or has one among others, and no ``bool``, which Python takes for a number."""
    parts = typing.get_args(annotation) or (annotation,)
    if bool in parts:
        return False
    return any(
        part in (int, float) or type(part) is int or (typing.get_args(part) and _wants_number(part)) for part in parts
    )


def known_keys(section: type[BaseModel] = RLRecipe, prefix: str = "") -> Iterator[str]:
    """Yield every key of a recipe with its full path, sections before their fields."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from known_keys(inner, f"{prefix}{name}.")


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in ``X``, ``X | None`` or ``list[X]``."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) in (typing.Union, list):
        return next((inner for arg in typing.get_args(annotation) if (inner := section_of(arg))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
