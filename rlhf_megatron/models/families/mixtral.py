"""Mixtral: a Mistral with experts in every layer, whose checkpoints have Mixtral's own names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, size
from rlhf_megatron.models.description import Architecture, Experts
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.mixture import EXPERT_TYPES, ExpertNames
from rlhf_megatron.models.families.windows import WindowFields
from rlhf_megatron.untrusted import shown

# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2}


@dataclasses.dataclass(frozen=True)
class Mixtral(Decoder):
    """The usual decoder; ``intermediate_size`` is that of an expert, and the weights of the chosen sum to 1."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        config = _ABSENT | dict(config)
        plain = super().read(path, config)
        count, chosen = (size(path, field, config) for field in ("num_local_experts", "num_experts_per_tok"))
        if chosen > count:
            raise ModelError(f"{shown(path)}: num_experts_per_tok is {chosen}, of {count} experts")
        return dataclasses.replace(plain, experts=Experts(count, chosen, plain.feed_forward, normalized=True))


FAMILY = Mixtral(
    "Mixtral",
    FamilyFields(
        read=frozenset({"num_local_experts", "num_experts_per_tok"}),
        types=EXPERT_TYPES,
        only=NO_ATTENTION_BIAS | {"router_jitter_noise": 0.0},
        never_null=("num_key_value_heads", "layer_types"),
        absent={"num_key_value_heads": 8},
    ),
    expert_names=ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2"),
    max_positions=131072,
    rope_theta=1_000_000.0,
    windows=WindowFields(),
)
