"""Phi-3, 3.5, 4 and 4-mini: queries, keys and values in one tensor, gate and up projection in another; LongRoPE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.windows import WindowFields

_ORIGINAL = "original_max_position_embeddings"
_KINDS = ("default", "longrope")  # transformers takes yarn for LongRoPE here, and vLLM does not


@dataclasses.dataclass(frozen=True)
class Phi3(Decoder):
    """The usual decoder with LongRoPE or plain rotary embeddings, of a part of a head where the config says so."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        for field in ("rope_scaling", "rope_parameters"):
            given = config[field] if isinstance(config.get(field), dict) else {}
            for key in ("type", "rope_type"):
                if given.get(key, "default") not in _KINDS:
                    raise unsupported(path, f"{field}.{key}", given[key], ", ".join(_KINDS))
        plain = super().read(path, {_ORIGINAL: 4096} | dict(config))
        if plain.head_dim != plain.hidden // plain.heads:  # by which transformers counts the factors of LongRoPE
            raise unsupported(path, "head_dim", plain.head_dim, "hidden_size / num_attention_heads")
        return plain


FAMILY = Phi3(
    "Phi3",
    FamilyFields(
        read=frozenset({_ORIGINAL, "partial_rotary_factor"}),
        only=NO_ATTENTION_BIAS | {"lm_head_bias": False, "interpolate_factor": 1, "full_attn_mod": 1},
        never_null=(_ORIGINAL, "partial_rotary_factor"),
        native=True,
    ),
    max_positions=4096,
    norm_epsilon=1e-5,
    partial_rotary=True,
    windows=WindowFields(),
    fused=("qkv_proj", "gate_up_proj"),
    has_rollout_table=False,
)
