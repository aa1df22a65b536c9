"""The parts of config.json that decoders of many families have in common, checked as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import number, size
from rlhf_megatron.untrusted import shown


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


def optional_number(path: Path, field: str, config: Mapping[str, Any], absent: float | None) -> float | None:
    """Return a number above 0, None for null, ``absent`` for an absent field."""
    return None if config.get(field, absent) is None else number(path, field, config, absent)
