"""OLMoE: experts in every layer, and norms of queries and keys over all heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.mixture import EXPERT_FIELDS, EXPERT_TYPES

_EPSILON = 1e-5  # vLLM's of norms of queries and keys, whatever the config says


@dataclasses.dataclass(frozen=True)
class Olmoe(Decoder):
    """The usual decoder; ``intermediate_size`` is an expert's."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, {"moe_intermediate_size": config.get("intermediate_size")} | dict(config))
        if plain.hidden != plain.heads * plain.head_dim:
            raise unsupported(path, "head_dim", plain.head_dim, "hidden_size / num_attention_heads")
        return plain

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        assert architecture.experts is not None
        if architecture.experts.normalized:
            return "norm_topk_prob is true, and vLLM leaves the weights of the chosen experts as they are in olmoe"
        if architecture.norm_epsilon != _EPSILON:
            return (
                f"rms_norm_eps is {architecture.norm_epsilon}, and vLLM norms queries and keys of olmoe with {_EPSILON}"
            )
        return super().rollout_problem(architecture)


FAMILY = Olmoe(
    "Olmoe",
    FamilyFields(
        read=EXPERT_FIELDS - {"moe_intermediate_size"},
        types=EXPERT_TYPES,
        only=NO_ATTENTION_BIAS | {"clip_qkv": None, "sliding_window": None},
    ),
    wide_query_key_norm=True,
    experts=True,
    max_positions=4096,
    norm_epsilon=_EPSILON,
    has_rollout_table=False,
)
