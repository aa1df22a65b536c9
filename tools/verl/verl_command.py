"""A command of verl: its keys, which of them were asked for, and what is to be told of the others; a recipe's tree.

Not here: what keys mean (verl_sections.py, verl_roles.py), and what becomes of those that nothing asks for
(verl_keys.tsv).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_keys import row_of, sections

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.recipe.load import apply_override
from rlhf_megatron.untrusted import shown

ACTOR, ROLLOUT, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
# Roles in verl's configuration, and the section of ours.
ROLES = {ACTOR: "actor", REFERENCE: "reference", "critic": "critic", "reward_model": "reward_model"}

# Keys whose values are mappings of names that are not verl's.
MAPPINGS = ("data.apply_chat_template_kwargs",)
DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}


@dataclass
class Command:
    """The keys of a command of verl, as they are asked for, and lines about those that a recipe cannot have."""

    given: dict[str, Any]
    asked: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    written: frozenset[str] = frozenset()  # keys of the command line, not of a composed file

    @property
    def is_of_megatron(self) -> bool:
        """True if verl would train with Megatron, and else with FSDP."""
        chosen = self.given.get(f"{ACTOR}.strategy", self.given.get("model_engine"))
        return chosen == "megatron" or (
            chosen is None and any(key.startswith(f"{ACTOR}.megatron.") for key in self.given)
        )

    @property
    def engine(self) -> str:
        """Engine that verl would train with: megatron, veomni, torchtitan, or fsdp for FSDP and its kin."""
        chosen = [self.given.get(key) for key in (f"{ACTOR}.strategy", "model_engine")]
        others = (name for name in ("veomni", "torchtitan") if name in chosen)
        return "megatron" if self.is_of_megatron else next(others, "fsdp")

    @property
    def is_stream(self) -> bool:
        """True of the fully asynchronous trainer, where prompts are drawn one by one."""
        return "rollout.total_rollout_steps" in self.given

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, verl's default where it is not given. Keys below one are a mapping.

        Raises RecipeError for a value of another kind than the default; null is as not given where that says nothing.
        """
        if key in self.given and key not in self.asked and _says_nothing(self.given[key], default):
            self.remark(key, "has no value, so verl's default is taken")
        self.asked.add(key)
        inner = {
            name.removeprefix(f"{key}."): value for name, value in self.given.items() if name.startswith(f"{key}.")
        }
        if inner and isinstance(default, dict):
            self.asked.update(f"{key}.{name}" for name in inner)
            return inner
        value = self.given.get(key, default)
        return default if value == "" else _of_kind(key, value, default)

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of several keys that is given and not null."""
        values = [_of_kind(key, value, default) for key in keys if (value := self.take(key)) is not None]
        return values[0] if values else default

    def number(self, key: str, default: float | None = None) -> Any:
        """Return the number of a key; raises RecipeError for what is none, or not finite."""
        value = self.take(key, default)
        return value if value is None else _of_kind(key, value, 0.0)

    def count(self, key: str, default: int | None = None) -> Any:
        """Return the whole number of a key, 1 or more; raises RecipeError for another."""
        value = self.number(key, default)
        if value is not None and (value != int(value) or value < 1):
            raise RecipeError(f"{key}={shown(value)}: must be a whole number, 1 or more")
        return value if value is None else int(value)

    def choose(self, key: str, default: str, choices: dict[str, str]) -> str | None:
        """Return the word for a key's value in ``choices``; None, and a refusal, where it has none."""
        value = self.take(key, default)
        if value not in choices:
            self.refuse(key, f"here are {', '.join(choices)}")
        return choices.get(value)

    def remark(self, key: str, text: str) -> None:
        """Tell that a key is not what it was, in a run that learns the same."""
        self.remarks.append(f"{self._shown(key)}: {text}")

    def refuse(self, key: str, text: str) -> None:
        """Tell that a key is left out, which makes the run another one."""
        self.refusals.append(f"{self._shown(key)}: {text}")

    def _shown(self, key: str) -> str:
        return f"{key}={shown(self.given[key])}" if key in self.given else key

    def pass_over(self, *beginnings: str) -> None:
        """Count keys that begin so as asked for: they are of what this command does not use."""
        self.asked.update(key for key in self.given if key.startswith(beginnings))


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Return Hydra's overrides as key -> value; raises RecipeError for other words. ``~key`` takes a key back."""
    given: dict[str, Any] = {}
    for word in words:
        if word.startswith("~"):
            given.pop(word[1:].partition("=")[0], None)
            continue
        key, separator, text = word.lstrip("+").partition("=")
        if not separator or not all(key.split(".")):
            raise RecipeError(f"{shown(word)}: not of the form key=value, as arguments of verl.trainer.main_ppo are")
        if "${" in text or text.startswith("$("):
            raise RecipeError(
                f"{shown(word)}: neither Hydra's nor a shell's expressions are understood; write the value"
            )
        given.update(keys_of(key, _value(text)))
    return given


def _value(text: str) -> Any:
    """Return the value of an override. Hydra's mappings need no space after a colon, and a backslash keeps what
    follows."""
    if not text:
        return ""
    values: dict[str, Any] = {}
    try:
        apply_override(values, f"value={text}")
    except RecipeError:
        if not text.startswith("{"):
            raise
        return text  # of a key whose mapping nothing reads
    return values["value"]


def keys_of(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a key with its value, or those of a mapping."""
    if isinstance(value, dict) and value and key not in MAPPINGS:
        for name, inner in value.items():
            yield from keys_of(f"{key}.{name}" if key else str(name), inner)
    elif isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        yield key, float(value)  # 1e-6, which YAML takes for text
    else:
        yield key, value


def _says_nothing(value: Any, default: Any) -> bool:
    """Return True for an empty value in the place of something."""
    return value == "" if not default else value in ("", None)


def _of_kind(key: str, value: Any, default: Any) -> Any:
    """Return ``value``, which is of the kind of a default; raises RecipeError where it is not."""
    if default is None or (value in (None, "") and not default):
        return default if value in (None, "") else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    kinds: tuple[tuple[type | tuple[type, ...], str, bool], ...] = (
        (bool, "true or false", isinstance(value, bool)),
        ((int, float), "a number that is finite", is_number),
        (str, "a text", isinstance(value, str)),
        (list, "a list or a text", isinstance(value, list | str)),
        (dict, "a mapping", isinstance(value, dict)),
    )
    kind, fits = next((kind, fits) for of, kind, fits in kinds if isinstance(default, of))
    if not fits:
        raise RecipeError(f"{key}={shown(value)}: must be {kind}")
    return value


def judge(command: Command) -> None:
    """Tell what becomes of the keys that nothing has asked for, by the table.

    Raises RecipeError for a value in a section's place.
    """
    for key, value in command.given.items():
        if key in sections() and value not in ({}, "") and key not in command.asked and row_of(key) is None:
            raise RecipeError(f"{key}={shown(value)}: is a section of keys, such as {key}.KEY=VALUE")
        if key in command.asked:
            continue
        row = row_of(key)
        if row is None:
            command.refuse(key, "is not known")
        elif row.fate in ("differs", "refused") and not row.accepts(value):
            (command.remark if row.fate == "differs" else command.refuse)(key, row.reason)


class Tree(dict[str, Any]):
    """Plain values of a recipe, set by paths of keys."""

    def put(self, path: str, value: Any) -> None:
        """Set a key; null is not written, since the default says as much."""
        if value is None:
            return
        if isinstance(value, str) and value.startswith("~/"):
            value = str(Path(value).expanduser())
        *parents, last = path.split(".")
        section: dict[str, Any] = self
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
