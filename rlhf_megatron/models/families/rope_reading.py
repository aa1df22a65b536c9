"""Rotary position embeddings of a config.json, in both spellings that transformers has used, as a ``Rope``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import brief, number, size, unsupported
from rlhf_megatron.models.rope import (
    SCALINGS,
    AlphaScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
)
from rlhf_megatron.untrusted import shown
from rlhf_megatron.yarn import attention_factor, factor_in, yarn_tables

_ORIGINAL = "original_max_position_embeddings"
_ATTN_FACTOR = "attn_factor"
_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_rope(
    path: Path,
    config: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    default_theta: float = 10_000.0,
    *,
    partial: bool = False,
    interleaved: bool = False,
    scalings: Mapping[str, type[Scaling]] = SCALINGS,
) -> Rope:
    """Return the position embeddings that the config at ``path`` says; raises ModelError for what is not supported.

    ``partial``: a family whose transformers class turns a part of a head where the config says so.
    ``scalings``: those that the family may have.
    """
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(field), dict | None):
            raise ModelError(f"{shown(path)}: {field} must be an object; it is {brief(config[field])}")
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as transformers chooses
    written: dict[str, Any] = config.get(field) or {}
    given = {key: value for key, value in written.items() if value is not None}
    theta = number(path, "rope_theta", written if "rope_theta" in written else config, default_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        difference = f"{field}.rope_type is {brief(kind)} and type is {brief(given['type'])}"
        raise ModelError(f"{shown(path)}: {difference}, which are one field; remove one")
    if not isinstance(kind, str) or kind not in ("default", *scalings):
        raise unsupported(path, f"{field}.rope_type", kind, ", ".join(("default", *scalings)))
    is_proportional = scalings.get(kind) is ProportionalScaling
    fraction = 1.0 if is_proportional else _rotated_fraction(path, field, given, config, head_dim, partial)
    known = {*_FIELDS, *(() if kind == "default" else _parameters(scalings[kind]))}
    for key in given:
        if key not in known:
            raise ModelError(
                f"{shown(path)}: {field}.{shown(key, 80)} is {brief(given[key])}, which this version does not know for "
                f"rope_type {kind}"
            )
    scaling = None
    if kind != "default":
        if "truncate" in written and written["truncate"] is None:
            raise unsupported(path, f"{field}.truncate", None, "true, false")  # transformers takes null for false
        # transformers prefers the config's own field, which only families that read it may have.
        original = config.get(_ORIGINAL, given.get(_ORIGINAL, max_positions))
        parameters = given | {_ORIGINAL: original}
        if kind == "linear" and type(given.get("factor")) is int:  # vLLM would go through it as through a list
            raise unsupported(path, f"{field}.factor", given["factor"], "a number with a point")
        scaling = _scaling(path, field, scalings[kind], parameters, max_positions)
        if isinstance(scaling, YarnScaling) and _ATTN_FACTOR in given:
            scaling = _with_attn_factor(path, field, scaling, number(path, _ATTN_FACTOR, given))
        _check(path, field, scaling, theta, int(head_dim * fraction))
    return Rope(theta, scaling, fraction, interleaved)


def rope_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for the person who starts a run where transformers takes other embeddings from a config.json."""
    text = config.get("text_config") or config
    for yarn in yarn_tables(text.get("rope_scaling") or text.get("rope_parameters")):
        ours, theirs = factor_in(yarn), factor_in(yarn | {_ATTN_FACTOR: None})
        if not _agree(ours, theirs):
            return (
                f"attn_factor scales queries and keys by {ours:g}, as in vLLM before 0.30; transformers and newer vLLM "
                f"ignore it and take {theirs:g}, unless config.json also has attention_factor: {ours:g}",
            )
    return ()


def _agree(factor: float, other: float) -> bool:
    return math.isclose(factor, other, rel_tol=1e-5)


def _with_attn_factor(path: Path, where: str, yarn: YarnScaling, attn_factor: float) -> YarnScaling:
    """Return ``yarn`` with the attention factor of ``attn_factor``; raises ModelError where others say another one."""
    factor = attention_factor(yarn.factor, attn_factor=attn_factor)
    said = attention_factor(yarn.factor, yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim)
    if (yarn.attention_factor or (yarn.mscale and yarn.mscale_all_dim)) and not _agree(factor, said):
        other = "attention_factor" if yarn.attention_factor else "the mscales"
        raise ModelError(
            f"{shown(path)}: {where}.{_ATTN_FACTOR} scales queries and keys by {factor:g}, and {other} by {said:g}; "
            "remove one"
        )
    return dataclasses.replace(yarn, attention_factor=factor)


def _parameters(scaling: type[Scaling]) -> list[str]:
    """Return the config's names of the parameters of a kind."""
    derived = ("is_long", "max_position_embeddings")
    names = [field.name for field in dataclasses.fields(scaling) if field.name not in derived]
    return [*names, _ATTN_FACTOR] if scaling is YarnScaling else names


def _rotated_fraction(
    path: Path, field: str, given: Mapping[str, Any], config: Mapping[str, Any], head_dim: int, partial: bool
) -> float:
    key = "partial_rotary_factor"
    named, where = (f"{field}.{key}", given) if key in given else (key, config)
    fraction = where.get(key)
    if fraction is None or (not partial and fraction == 1.0):
        return 1.0
    if not partial:
        raise unsupported(path, named, fraction, "1.0")
    turned = int(head_dim * number(path, key, where)) if fraction != 0 else 0
    if fraction > 1 or turned % 2 or turned < 2:
        raise unsupported(path, named, fraction, f"one that turns an even part of a head of {head_dim}, 2 at least")
    return float(fraction)


def _scaling(path: Path, where: str, kind: type[Scaling], given: Mapping[str, Any], max_positions: int) -> Scaling:
    """Return the scaling of a kind, each parameter checked by its type."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        name, has_default = field.name, field.default is not dataclasses.MISSING
        if name == "max_position_embeddings":
            values[name] = max_positions
        elif name not in given and has_default:
            continue
        elif name not in given:
            raise ModelError(f"{shown(path)}: {where}.{name} is missing")
        elif str(field.type).startswith("tuple"):
            values[name] = _numbers(path, where, name, given[name])
        elif field.type == "int":
            values[name] = size(path, name, given)
        elif field.type == "bool":
            if not isinstance(given[name], bool):
                raise unsupported(path, f"{where}.{name}", given[name], "true, false")
            values[name] = given[name]
        else:
            values[name] = number(path, name, given)
    return kind(**values)


def _numbers(path: Path, where: str, name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not values or len(values) > 2**12:
        raise ModelError(f"{shown(path)}: {where}.{name} is {brief(values)}; it must be a list of numbers above 0")
    return tuple(number(path, name, {name: value}) for value in values)


def _check(path: Path, where: str, scaling: Scaling, theta: float, turned: int) -> None:
    """Raise ModelError for parameters that no formula takes, or that do not go together."""
    if isinstance(scaling, Llama3Scaling) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise unsupported(path, f"{where}.high_freq_factor", scaling.high_freq_factor, "above low_freq_factor")
    if isinstance(scaling, YarnScaling) and theta <= 1:
        raise unsupported(path, "rope_theta", theta, "above 1 for rope_type yarn")
    if isinstance(scaling, ProportionalScaling) and scaling.partial_rotary_factor > 1:
        raise unsupported(path, f"{where}.partial_rotary_factor", scaling.partial_rotary_factor, "at most 1.0")
    if isinstance(scaling, AlphaScaling) and turned < 4:
        raise unsupported(path, "head_dim", turned, f"4 and more with {where}.alpha")
    if isinstance(scaling, LongScaling):
        if scaling.original_max_position_embeddings < 2:
            raise unsupported(path, f"{where}.{_ORIGINAL}", scaling.original_max_position_embeddings, "2 and more")
        for name in ("short_factor", "long_factor"):
            factors = len(getattr(scaling, name))
            if factors != turned // 2:
                raise ModelError(
                    f"{shown(path)}: {where}.{name} has {factors} numbers, and {turned // 2} pairs of a head turn"
                )
