"""The parts of config.json that decoders of many families have in common, checked as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import brief, number, size, unsupported
from rlhf_megatron.models.rotary_table import LLAMA3
from rlhf_megatron.untrusted import shown

_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read_rope(path: Path, config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Return (theta, factor of Llama 3's scaling or None), from either spelling that transformers has used."""
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(field), dict | None):
            raise ModelError(f"{shown(path)}: {field} must be an object; it is {brief(config[field])}")
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as transformers chooses
    given: dict[str, Any] = {key: value for key, value in (config.get(field) or {}).items() if value is not None}
    theta = number(path, "rope_theta", given if "rope_theta" in given else config, 10000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        told = f"{field}.rope_type is {brief(kind)} and type is {brief(given['type'])}"
        raise ModelError(f"{shown(path)}: {told}, which are one field; remove one")
    if kind not in ("default", "llama3"):
        raise unsupported(path, f"{field}.rope_type", kind, "default, llama3")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(path, f"{field}.partial_rotary_factor", given["partial_rotary_factor"], "1.0")
    known = (*_ROPE_FIELDS, *(("factor", *LLAMA3) if kind == "llama3" else ()))
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ModelError(
            f"{shown(path)}: {field}.{shown(unknown[0], 80)} is {brief(given[unknown[0]])}, which this version does "
            f"not know for rope_type {kind}"
        )
    if kind == "default":
        return theta, None
    factor = number(path, "factor", given)
    for key, value in LLAMA3.items():
        if isinstance(given.get(key), bool) or given.get(key) != value:
            raise unsupported(path, f"{field}.{key}", given.get(key), str(value))
    return theta, factor


def read_heads(path: Path, config: Mapping[str, Any], absent: Mapping[str, int]) -> tuple[int, int, int]:
    """Return (query heads, key-value heads, size of a head); raises ModelError where they do not go together."""
    heads, hidden = size(path, "num_attention_heads", config), size(path, "hidden_size", config)
    derived = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    for field, default in absent.items():
        if field not in config and default != derived[field]:
            raise ModelError(f"{shown(path)}: {field} is missing; add it (transformers would take {default})")
    key_value_heads = size(path, "num_key_value_heads", config, heads)
    if heads % key_value_heads:
        raise ModelError(
            f"{shown(path)}: num_attention_heads is {heads}, no multiple of num_key_value_heads, {key_value_heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"{shown(path)}: hidden_size is {hidden}, no multiple of num_attention_heads, {heads}; head_dim is missing"
        )
    head_dim = size(path, "head_dim", config, hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{shown(path)}: head_dim is {head_dim}; it must be even, since positions turn pairs")
    return heads, key_value_heads, head_dim
