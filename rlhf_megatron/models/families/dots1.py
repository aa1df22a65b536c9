"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts behind dense layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import grouped_experts
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.windows import WindowFields

# What transformers takes for an absent field, where other decoders have something else.
_ABSENT = {"max_window_layers": 62}


@dataclasses.dataclass(frozen=True)
class Dots1(Decoder):
    """The usual decoder, some of whose layers have experts by corrected sigmoid scores."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        config = _ABSENT | dict(config)
        experts = grouped_experts.read_experts(path, config, grouped_experts.CORRECTED_SIGMOID)
        return grouped_experts.with_experts(path, config, super().read(path, config), experts)

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        return "vLLM has no dots1 since its version 0.23; it is trained only"


FAMILY = Dots1(
    "Dots1",
    FamilyFields(
        read=grouped_experts.FIELDS - {"num_mtp_layers", "num_nextn_predict_layers"},
        types={"output_router_logits": (bool,)},
        only=NO_ATTENTION_BIAS | {"moe_layer_freq": 1, "scoring_func": "noaux_tc"},
        never_null=(*grouped_experts.NEVER_NULL, "first_k_dense_replace", "n_group", "topk_group"),
        absent={"num_key_value_heads": 32},
        native=True,
    ),
    query_key_norm=True,
    expert_names=grouped_experts.NAMES,
    max_positions=2048,
    windows=WindowFields(absent=4096, layers="last", by_type=True),
    has_rollout_table=False,
)
