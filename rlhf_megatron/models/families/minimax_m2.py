"""MiniMax-M2 to M2.5: experts by corrected sigmoid scores in every layer, and norms of queries and keys over heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, size, unsupported
from rlhf_megatron.models.description import Architecture, Experts, Routing
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.deepseek_v3 import tied_problem
from rlhf_megatron.models.families.mixture import EXPERT_TYPES, ExpertNames
from rlhf_megatron.untrusted import shown

# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"num_experts_per_tok": 8, "num_local_experts": 256}
# What transformers takes for granted, and vLLM does not.
_NAMED = {"scoring_func": "sigmoid", "use_routing_bias": True}
_ONLY = {
    "qk_norm_type": "per_layer",
    "router_jitter_noise": 0.0,
    "shared_intermediate_size": 0,
    "sliding_window": None,
    "use_qk_norm": True,
}
# Of attention and shared experts that other models of the makers have, and of layers that checkpoints lack.
_TYPES: dict[str, tuple[type, ...]] = {
    "attn_type_list": (list,),
    "mlp_intermediate_size": (int,),
    "mtp_transformer_layers": (int,),
    "num_mtp_modules": (int,),
    "shared_moe_mode": (str,),
    "use_mtp": (bool,),
    **dict.fromkeys(
        ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"), (float,)
    ),
}


@dataclasses.dataclass(frozen=True)
class MinimaxM2(Decoder):
    """The usual decoder; ``intermediate_size`` is an expert's, and the weights of the chosen sum to 1."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family; ``rotary_dim`` numbers of a head turn."""
        for field, value in _NAMED.items():
            if config.get(field) is None:
                raise ModelError(f"{shown(path)}: {field} is missing; add {value!r}, since vLLM would take another")
        config = _ABSENT | dict(config)
        if any(kind != 1 for kind in config.get("attn_type_list") or ()):
            raise unsupported(path, "attn_type_list", config["attn_type_list"], "1, attention, in every layer")
        turned, of = size(path, "rotary_dim", config), size(path, "head_dim", config)
        plain = super().read(path, {"partial_rotary_factor": turned / of} | config)
        if plain.rope.rotated_fraction != turned / of:
            raise unsupported(path, "partial_rotary_factor", plain.rope.rotated_fraction, "rotary_dim / head_dim")
        count, chosen = (size(path, field, config) for field in ("num_local_experts", "num_experts_per_tok"))
        if chosen > count:
            raise ModelError(f"{shown(path)}: num_experts_per_tok is {chosen}, of {count} experts")
        routing = Routing("sigmoid", corrected=True)
        return dataclasses.replace(
            plain, experts=Experts(count, chosen, plain.feed_forward, normalized=True, routing=routing)
        )

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        return super().rollout_problem(architecture) or tied_problem(architecture)


FAMILY = MinimaxM2(
    "MiniMaxM2",
    FamilyFields(
        read=frozenset({"partial_rotary_factor", "rotary_dim", *_ABSENT}),
        types=EXPERT_TYPES | _TYPES,
        only=NO_ATTENTION_BIAS | _NAMED | _ONLY,
        never_null=("head_dim", "num_key_value_heads", *_ABSENT),
        absent={"num_key_value_heads": 8, "head_dim": 128},
        native=True,
    ),
    wide_query_key_norm=True,
    expert_names=ExpertNames(
        module="block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias"
    ),
    max_positions=196608,
    rope_theta=5_000_000.0,
    partial_rotary=True,
    has_rollout_table=False,
)
