"""Solar Open: a Llama whose layers all have experts by corrected sigmoid scores beside a shared one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import LAYERS_LEFT_OUT, FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import grouped_experts
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.decoder import Decoder

_DENSE = "first_k_dense_replace"
# What transformers takes for absent fields, where other decoders have something else. No layer has a feed-forward
# layer of the width intermediate_size, which files may leave out.
_ABSENT = {"intermediate_size": 1, "norm_topk_prob": True}


@dataclasses.dataclass(frozen=True)
class SolarOpen(Decoder):
    """The usual decoder with experts in every layer."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        config = _ABSENT | dict(config)
        experts = grouped_experts.read_experts(path, config, grouped_experts.CORRECTED_SIGMOID)
        return grouped_experts.with_experts(path, config, super().read(path, config), experts)

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        return "vLLM has no solar_open; it is trained only"


FAMILY = SolarOpen(
    "SolarOpen",
    FamilyFields(
        read=grouped_experts.FIELDS - {_DENSE, *LAYERS_LEFT_OUT} | {"attention_bias"},
        types={"output_router_logits": (bool,)},
        only={_DENSE: 0, "use_qk_norm": False, "qkv_bias": False, "sliding_window": None},
        never_null=(
            *grouped_experts.NEVER_NULL,
            *("head_dim", "n_group", "topk_group", "num_key_value_heads", "num_experts_per_tok"),
        ),
        absent={"num_key_value_heads": 8, "head_dim": 128},
    ),
    bias_fields=BiasFields(qkv="attention_bias"),
    expert_names=grouped_experts.NAMES,
    max_positions=131072,
    norm_epsilon=1e-5,
    rope_theta=1_000_000.0,
    has_rollout_table=False,
)
