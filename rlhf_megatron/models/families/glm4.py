"""GLM-4: norms around sublayers, half of a head turned in pairs of neighbours, gate and up projection in one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.norm_names import NormNames

# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"attention_bias": True, "partial_rotary_factor": 0.5}


@dataclasses.dataclass(frozen=True)
class Glm4(Decoder):
    """The usual decoder with other pairs of turned numbers."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, _ABSENT | dict(config))
        return dataclasses.replace(plain, rope=dataclasses.replace(plain.rope, interleaved=True))


FAMILY = Glm4(
    "Glm4",
    FamilyFields(
        read=frozenset({"attention_bias", "partial_rotary_factor"}),
        only={"qkv_bias": False},
        never_null=("head_dim", "num_key_value_heads", "partial_rotary_factor"),
        absent={"num_key_value_heads": 2, "head_dim": 128},
    ),
    bias_fields=BiasFields(qkv="attention_bias"),
    max_positions=131072,
    norm_epsilon=1.5625e-7,
    partial_rotary=True,
    norms=NormNames(after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"),
    fused=("gate_up_proj",),
    has_rollout_table=False,
)
