"""GLM-4.5 to 4.7, Air too: half of each head turns, experts by corrected sigmoid scores behind dense layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, flag
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import grouped_experts
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.mixture import EXPERT_TYPES
from rlhf_megatron.untrusted import shown

# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"first_k_dense_replace": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}


@dataclasses.dataclass(frozen=True)
class Glm4Moe(Decoder):
    """The usual decoder; the config says whether it has norms of queries and keys, and biases of these and values."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        if config.get("head_dim") is None:
            raise ModelError(f"{shown(path)}: head_dim is missing; add it (vLLM takes it for granted)")
        config = _ABSENT | dict(config)
        experts = grouped_experts.read_experts(path, config, grouped_experts.CORRECTED_SIGMOID)
        plain = grouped_experts.with_experts(path, config, super().read(path, config), experts)
        norm, bias = flag(path, "use_qk_norm", config), flag(path, "attention_bias", config)
        return dataclasses.replace(plain, query_key_norm=norm, qkv_bias=bias)


FAMILY = Glm4Moe(
    "Glm4Moe",
    FamilyFields(
        read=grouped_experts.FIELDS | {"attention_bias", "partial_rotary_factor", "use_qk_norm"},
        types=EXPERT_TYPES,
        never_null=(
            *grouped_experts.NEVER_NULL,
            *("first_k_dense_replace", "n_group", "topk_group", "use_qk_norm"),
            *("num_key_value_heads", "num_experts_per_tok"),
        ),
        absent={"num_key_value_heads": 8},
    ),
    expert_names=grouped_experts.NAMES,
    max_positions=131072,
    partial_rotary=True,
    has_rollout_table=False,
    predicts=True,
)
