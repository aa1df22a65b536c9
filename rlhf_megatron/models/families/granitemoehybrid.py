"""Granite 4 without Mamba and experts (Micro, 1B, 350M): Granite 3, with the feed-forward layer of a shared expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, size, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import granite
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS
from rlhf_megatron.models.families.mixture import EXPERT_TYPES

_KINDS = ("attention", "full_attention")
_POSITIONS = (None, "nope", "rope")
_MAMBA = (
    "mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand",
    "mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit",
)  # fmt: skip
_SIZES = ("mamba_d_head", "mamba_expand", "mamba_n_heads")
_TYPES: dict[str, tuple[type, ...]] = {
    "init_method": (str,),
    "num_experts_per_tok": (int,),
    **dict.fromkeys(_MAMBA, (bool, int, str, list)),
}


@dataclasses.dataclass(frozen=True)
class GraniteHybrid(granite.Granite):
    """Granite's decoder, whose heads have no positions unless ``position_embedding_type`` is "rope"."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; the width of the feed-forward layer is ``shared_intermediate_size``."""
        types = config.get("layer_types")
        if not isinstance(types, list) or any(kind not in _KINDS for kind in types):
            raise unsupported(path, "layer_types", types, "attention in every layer, without Mamba")
        experts = config.get("num_local_experts", 8)
        if type(experts) is not int or experts:
            raise unsupported(path, "num_local_experts", experts, "0")
        positions = config.get("position_embedding_type")
        if positions not in _POSITIONS:
            raise unsupported(path, "position_embedding_type", positions, "rope; nope or null for none")
        _check_mamba(path, config)
        width = size(path, "shared_intermediate_size", config, 1024)
        plain = super().read(path, {**config, "layer_types": ["full_attention"] * len(types)})
        plain = dataclasses.replace(plain, feed_forward=width)
        return plain if positions == "rope" else dataclasses.replace(plain, mixed_ropes=(None,) * plain.layers)


def _check_mamba(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError for sizes of Mamba's layers that transformers refuses, though there is no such layer."""
    width = size(path, "mamba_expand", config, 2) * size(path, "hidden_size", config)
    heads = size(path, "mamba_n_heads", config, 128)
    if width % heads or config.get("mamba_d_head", "auto") not in ("auto", width // heads):
        raise unsupported(path, "mamba_n_heads", heads, "mamba_expand x hidden_size / mamba_d_head")


FAMILY = GraniteHybrid(
    "GraniteMoeHybrid",
    FamilyFields(
        read=granite.FAMILY.fields.read | {"num_local_experts", "position_embedding_type", "shared_intermediate_size"},
        types={**granite.FAMILY.fields.types, **EXPERT_TYPES, **_TYPES},
        only=NO_ATTENTION_BIAS | {"normalization_function": "rmsnorm", "sliding_window": None},
        never_null=(*granite.FAMILY.fields.never_null, "shared_intermediate_size", *_SIZES),
    ),
    max_positions=2048,
    fused=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    vllm_divides_heads=True,
    has_rollout_table=False,
)
