"""DeepSeek-V2, Lite and Coder-V2: latent attention, and experts by the softmax, in V2 within the best groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, brief, unsupported
from rlhf_megatron.models.description import Architecture, Routing
from rlhf_megatron.models.families import grouped_experts, latent
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.deepseek_v3 import NEVER_NULL, WITHOUT_EFFECT, tied_problem, with_latent_attention
from rlhf_megatron.untrusted import shown

_METHODS = ("greedy", "group_limited_greedy")


@dataclasses.dataclass(frozen=True)
class DeepseekV2(Decoder):
    """The usual decoder with latent attention; a group of experts is as good as its best one."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        method = config.get("topk_method", _METHODS[0])
        if method not in _METHODS:
            raise unsupported(path, "topk_method", method, " or ".join(_METHODS))
        for field in ("n_group", "topk_group"):
            given = config.get(field)
            if given is None or (method == "greedy" and given != 1):
                wanted = "1 where topk_method is greedy" if method == "greedy" else "a number"
                raise ModelError(f"{shown(path)}: {field} is {brief(given)}; it must be {wanted}")
        plain = with_latent_attention(path, config, super().read)
        if plain.hidden % plain.heads:
            raise unsupported(path, "hidden_size", plain.hidden, f"a multiple of num_attention_heads, {plain.heads}")
        experts = grouped_experts.read_experts(path, config, Routing("softmax"))
        return grouped_experts.with_experts(path, config, plain, experts)

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        return super().rollout_problem(architecture) or tied_problem(architecture)


FAMILY = DeepseekV2(
    "DeepseekV2",
    FamilyFields(
        read=(grouped_experts.FIELDS | latent.FIELDS | {"topk_method"}) - {"norm_topk_prob"},
        types=WITHOUT_EFFECT,
        only=NO_ATTENTION_BIAS
        | {"moe_layer_freq": 1, "norm_topk_prob": False, "num_nextn_predict_layers": 0, "scoring_func": "softmax"},
        never_null=(*NEVER_NULL, *grouped_experts.NEVER_NULL, "v_head_dim"),
        native=True,
    ),
    expert_names=grouped_experts.NAMES,
    max_positions=2048,
    has_rollout_table=False,
)
