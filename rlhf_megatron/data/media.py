"""Images, videos and sound in rows, by the names and the form that data sets give them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from typing import Any

import pyarrow

_NAME = re.compile(r"(image|video|audio)s?(_\d+)?")  # images in geo3k of verl's, image_1 in MMMU
_FORM = {"bytes", "path"}  # in which `datasets` keeps a picture or a sound


def media_of_schema(schema: pyarrow.Schema) -> list[str]:
    """Return the columns of a table that are of images, videos or sound."""
    return [field.name for field in schema if _NAME.fullmatch(field.name) or _is_of_media(field.type)]


def media_of_row(values: Mapping[str, Any]) -> list[str]:
    """Return the columns of a row that hold images, videos or sound: neither None nor empty, and no numbers."""
    return [name for name, value in values.items() if _has_content(value) and (_is_name(name) or _is_medium(value))]


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _is_of_media(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        return _is_of_media(kind.value_type)
    return pyarrow.types.is_struct(kind) and {field.name for field in kind} == _FORM


def _is_medium(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_medium, value))
    return isinstance(value, dict) and value.keys() == _FORM


def _has_content(value: Any) -> bool:
    """Return whether there is something; pictures and arrays have no truth of their own."""
    return not isinstance(value, int | float | None) and not (isinstance(value, Sized) and len(value) == 0)
