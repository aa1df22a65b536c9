"""GLM-4.7-Flash: DeepSeek-V3's layers under names of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import grouped_experts, latent
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS
from rlhf_megatron.models.families.deepseek_v3 import NEVER_NULL, DeepseekV3
from rlhf_megatron.untrusted import shown

# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"norm_topk_prob": True, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8}


@dataclasses.dataclass(frozen=True)
class Glm4MoeLite(DeepseekV3):
    """The dense layers are named twice: vLLM counts them, and transformers has a list."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        if config.get("first_k_dense_replace") is None:
            raise ModelError(f"{shown(path)}: first_k_dense_replace is missing; add it (vLLM takes it for granted)")
        read = self.read_layers(path, _ABSENT | dict(config))
        types = [{"experts": "sparse", "dense": "dense"}[kind.feed_forward] for kind in read.layer_kinds]
        named = config.get("mlp_layer_types", ["dense"] + ["sparse"] * (read.layers - 1))
        if named != types:
            raise unsupported(path, "mlp_layer_types", named, "what first_k_dense_replace says")
        return read


FAMILY = Glm4MoeLite(
    "Glm4MoeLite",
    FamilyFields(
        read=grouped_experts.FIELDS | latent.FIELDS | {"mlp_layer_types"},
        types={"output_router_logits": (bool,)},
        only=NO_ATTENTION_BIAS | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True},
        never_null=(
            *NEVER_NULL,
            *grouped_experts.NEVER_NULL,
            *("n_group", "topk_group", "num_key_value_heads", "num_experts_per_tok", "v_head_dim"),
        ),
        absent={"num_key_value_heads": 20},
    ),
    expert_names=grouped_experts.NAMES,
    max_positions=202752,
    has_rollout_table=False,
    predicts=True,
)
