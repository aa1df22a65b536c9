"""Qwen3.5's language model with experts beside a shared one in every layer.

A checkpoint that has the vision tower too is of another ``model_type``, and not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.delta_decoder import FIELDS, NEVER_NULL
from rlhf_megatron.models.families.mixture import EXPERT_FIELDS, EXPERT_TYPES
from rlhf_megatron.models.families.qwen3_5_text import QWEN3_5_ONLY, QWEN3_5_TYPES, Qwen35


@dataclasses.dataclass(frozen=True)
class Qwen35Moe(Qwen35):
    """A Qwen3.5 without dense layers, whose config has no size for them."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        return super().read(path, {"intermediate_size": config.get("moe_intermediate_size")} | dict(config))


FAMILY = Qwen35Moe(
    "Qwen3_5MoeText",
    FamilyFields(
        read=(FIELDS | EXPERT_FIELDS | {"shared_expert_intermediate_size"}) - {"norm_topk_prob"},
        types=EXPERT_TYPES | QWEN3_5_TYPES,
        only=QWEN3_5_ONLY | {"decoder_sparse_step": 1, "norm_topk_prob": True},
        never_null=(*NEVER_NULL, "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok"),
        absent={"num_key_value_heads": 2, "head_dim": 256},
    ),
    language_class="Qwen3_5MoeForCausalLM",
    experts=True,
)
