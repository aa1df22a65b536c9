"""K-EXAONE: EXAONE 4's attention with norms before it, and experts by corrected sigmoid scores behind dense layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, size, unsupported
from rlhf_megatron.models.description import Architecture
from rlhf_megatron.models.families import grouped_experts
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS
from rlhf_megatron.models.families.exaone4 import Exaone4
from rlhf_megatron.models.families.windows import PATTERN, WindowFields

_DENSE, _KINDS = "first_k_dense_replace", "mlp_layer_types"
_FORMER = ("first_last_k_dense_replace", "is_moe_layer")  # which nothing reads any more
_COUNTS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}  # DeepSeek's names
# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {_DENSE: 1, "norm_topk_prob": True, "num_shared_experts": 1, "routed_scaling_factor": 2.5}


@dataclasses.dataclass(frozen=True)
class ExaoneMoe(Exaone4):
    """The decoder of EXAONE 4, some of whose layers have experts."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        config = _ABSENT | dict(config)
        config |= {theirs: size(path, own, config) for own, theirs in _COUNTS.items()}
        plain = super().read(path, config)
        dense = _dense_layers(path, config, plain.layers)
        for field, value in zip(_FORMER, (dense, [layer >= dense for layer in range(plain.layers)]), strict=True):
            if config.get(field) not in (None, value):
                raise unsupported(path, field, config[field], f"as {_KINDS} or {_DENSE} says")
        experts = grouped_experts.read_experts(path, config, grouped_experts.CORRECTED_SIGMOID)
        return grouped_experts.with_experts(path, config | {_DENSE: dense}, plain, experts)


def _dense_layers(path: Path, config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers in front have no experts."""
    kinds = config.get(_KINDS)
    if kinds is None:
        return grouped_experts.whole_number(path, _DENSE, config)
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise unsupported(path, _KINDS, kinds, f"dense layers, then sparse ones, {layers} in all")
    return dense


FAMILY = ExaoneMoe(
    "ExaoneMoe",
    FamilyFields(
        read=grouped_experts.FIELDS - set(_COUNTS.values()) | {*_COUNTS, *_FORMER, _KINDS, PATTERN},
        types={"output_router_logits": (bool,)},
        only=NO_ATTENTION_BIAS | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        never_null=(
            *("first_k_dense_replace", "n_group", "num_experts_per_tok", "num_key_value_heads"),
            *("num_shared_experts", "routed_scaling_factor", "sliding_window", "topk_group"),
        ),
        absent={"num_key_value_heads": 32},
        former_class="ExaoneMoEForCausalLM",
    ),
    query_key_norm=True,
    max_positions=2048,
    norm_epsilon=1e-5,
    expert_names=dataclasses.replace(grouped_experts.NAMES, correction="e_score_correction_bias"),
    windows=WindowFields(absent=4096, layers="pattern", full_every=4, by_type=True),
    vllm_mixes_windows=True,
    has_rollout_table=False,
)
