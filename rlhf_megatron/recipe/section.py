"""The base of every section of a recipe: frozen, with no unknown keys, and with a docstring under each field."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from rlhf_megatron.shipped import shipped_path
from rlhf_megatron.untrusted import shown

# Counts, sizes and seeds go on into 32 bits: those of kernels, of NCCL, of parquet, and of NumPy's generators.
LARGEST_INTEGER = 2**32 - 1
# The normal numbers of float32, which losses and optimizers are computed in.
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
# Ten years. Beyond about 300 the timers of the system and of Python overflow.
LONGEST_SECONDS = 10 * 365 * 24 * 3600.0
# A petabyte, in GB of 2^30 bytes.
LARGEST_MEMORY_GB = 2.0**20
# Processes of one replica for one purpose.
MOST_WORKERS = 4096


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_variable(key: str, name: str | None) -> None:
    """Raise ValueError where ``name`` cannot be that of an environment variable, as its value is not; it stays hidden,
    since it may be a secret."""
    if name is not None and not _VARIABLE.fullmatch(name):
        raise ValueError(f"{key}: names an environment variable, of letters, digits and _; what is given is none")


def make_all(checks: Iterable[Callable[[], None]]) -> None:
    """Make all checks, and raise ValueError with what those say that raise one."""
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))


class Section(BaseModel):
    """A part of a recipe. Values are never rewritten once it is made, and all its numbers are finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse true and false in place of a number, which Python has as 1 and 0, and numbers in place of them."""
        assert field.field_name is not None
        kinds = _kinds_of(cls, field.field_name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool) and kinds & {int, float} and bool not in kinds:
                raise ValueError(f"must be a number; it is {str(each).lower()}")
            if type(each) in (int, float) and bool in kinds and not kinds & {int, float}:
                raise ValueError(f"must be true or false; it is {shown(each, 40)}")
        return value

    @field_validator("*")
    @classmethod
    def _numbers_fit(cls, value: Any) -> Any:
        """Refuse numbers that would overflow, or vanish, on the way to where they are used."""
        for each in value if isinstance(value, list) else [value]:
            if type(each) is int and abs(each) > LARGEST_INTEGER:
                raise ValueError(f"must be a number of 32 bits, up to {LARGEST_INTEGER}; it is {shown(each, 40)}")
            if isinstance(each, float) and each and not SMALLEST_FLOAT <= abs(each) <= LARGEST_FLOAT:
                raise ValueError(
                    f"must be 0 or of a size from {SMALLEST_FLOAT:.3g} to {LARGEST_FLOAT:.3g}, which float32 has; "
                    f"it is {each:g}"
                )
        return value

    @field_validator("*")
    @classmethod
    def _shipped_files_are_found(cls, value: Any) -> Any:
        """Find recipes/... also where the working directory is no checkout."""
        if isinstance(value, list):
            return [shipped_path(each) if isinstance(each, str) else each for each in value]
        return shipped_path(value) if isinstance(value, str) else value

    def changed(self, *keys: str) -> list[str]:
        """Return those of these keys whose values are not the defaults; a recipe that is written out has them all."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]


@functools.cache
def _kinds_of(section: type[Section], field: str) -> set[type]:
    """Return the ``_kinds`` of a field's annotation."""
    return _kinds(section.model_fields[field].annotation)


def _kinds(annotation: Any) -> set[type]:
    """Return the classes that an annotation is made of; a Literal has those of its choices."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return {type(choice) for choice in arguments}
    if not arguments:
        return {annotation} if isinstance(annotation, type) else set()
    return set().union(*(_kinds(argument) for argument in arguments))
