"""The kinds of model that are supported, one entry per Hugging Face ``model_type``."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """What the decoder layers of one Hugging Face ``model_type`` have, and what transformers' classes begin with.

    ``positions``: max_position_embeddings of a config without.
    ``only``: fields of its config and the one value of each that is supported, which is what an absent field means.
    ``never_null``: fields that transformers' class of this kind refuses as null.
    ``absent``: sizes that transformers takes for absent fields, where it does not derive them from others.
    """

    classes: str
    query_key_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    positions: int = 32768
    only: tuple[tuple[str, Any], ...] = ()
    never_null: tuple[str, ...] = ()
    absent: tuple[tuple[str, int], ...] = ()


_NO_BIAS = (("attention_bias", False), ("qkv_bias", False))
_NORMED = (*_NO_BIAS, ("use_qk_norm", True))
FAMILIES = {
    "llama": Family("Llama", positions=2048, only=(*_NO_BIAS, ("sliding_window", None))),
    "mistral": Family(
        "Mistral",
        positions=131072,
        only=(*_NO_BIAS, ("sliding_window", None)),
        never_null=("num_key_value_heads", "layer_types"),
        absent=(("num_key_value_heads", 8),),
    ),
    "qwen2": Family("Qwen2", qkv_bias=True, only=(("qkv_bias", True),), absent=(("num_key_value_heads", 32),)),
    "qwen3": Family(
        "Qwen3",
        query_key_norm=True,
        only=_NORMED,
        never_null=("head_dim",),
        absent=(("num_key_value_heads", 32), ("head_dim", 128)),
    ),
    "qwen3_moe": Family(
        "Qwen3Moe",
        query_key_norm=True,
        experts=True,
        only=(
            *_NORMED,
            ("decoder_sparse_step", 1),
            ("mlp_only_layers", []),
            ("shared_expert_intermediate_size", 0),
        ),
        never_null=("num_key_value_heads", "head_dim"),
        absent=(("num_key_value_heads", 4),),
    ),
}
