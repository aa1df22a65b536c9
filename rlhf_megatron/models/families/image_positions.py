"""Positions of images and videos in rotary embeddings: three of each token, which of a text's tokens are one.

Each of a head's turned pairs goes by one of the three (``mrope_section``), so that text has ordinary embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import unsupported

_SECTION, _INTERLEAVED = "mrope_section", "mrope_interleaved"
_FIELDS = ("rope_parameters", "rope_scaling")
_KIND = "mrope"  # the type of earlier configs, whose embeddings are the default ones


def without_sections(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config at ``path`` as that of a text model; raises ModelError for values of another kind."""
    plain = dict(config)
    for field in _FIELDS:
        given = config.get(field)
        if isinstance(given, dict):
            _check(path, given)
            rope = {key: value for key, value in given.items() if key not in (_SECTION, _INTERLEAVED)}
            plain[field] = {
                key: "default" if key in ("rope_type", "type") and value == _KIND else value
                for key, value in rope.items()
            }
    return plain


def check_pairs(path: Path, config: Mapping[str, Any], pairs: int) -> None:
    """Raise ModelError where a config that ``without_sections`` takes has sections of other than ``pairs`` pairs."""
    for field in _FIELDS:
        section = (config.get(field) or {}).get(_SECTION)
        if section is not None and sum(section) != pairs:
            raise _wrong_section(path, section, pairs)


def _check(path: Path, rope: Mapping[str, Any]) -> None:
    section = rope.get(_SECTION)
    if section is not None and (
        not isinstance(section, list) or len(section) != 3 or any(type(part) is not int or part < 0 for part in section)
    ):
        raise _wrong_section(path, section)
    if rope.get(_INTERLEAVED) not in (None, True, False):
        raise unsupported(path, _INTERLEAVED, rope[_INTERLEAVED], "true, false")


def _wrong_section(path: Path, section: object, pairs: int | None = None) -> ModelError:
    wanted = "three whole numbers" if pairs is None else f"three whole numbers of {pairs} pairs in all"
    return unsupported(path, _SECTION, section, wanted)
