"""Mistral Small 4: DeepSeek's latent attention and experts, with Ministral 3's growing queries.

Experts are chosen by the softmax, within the groups of the best two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import FamilyFields, unsupported
from rlhf_megatron.models.description import Architecture, Routing
from rlhf_megatron.models.families import grouped_experts, latent
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.deepseek_v3 import NEVER_NULL, with_latent_attention
from rlhf_megatron.models.families.ministral3 import with_growth
from rlhf_megatron.models.rope import SCALINGS

# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"n_shared_experts": 1, "norm_topk_prob": True}


@dataclasses.dataclass(frozen=True)
class Mistral4(Decoder):
    """The usual decoder with latent attention, whose experts are in groups."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        return with_growth(path, _ABSENT | dict(config), self._read_rows)

    def _read_rows(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        plain = with_latent_attention(path, _without_repeated_sizes(path, config), super().read)
        experts = grouped_experts.read_experts(path, config, Routing("softmax", counted_of_group=2))
        return grouped_experts.with_experts(path, config, plain, experts)

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        return "vLLM has mistral4 in Mistral's own format alone; it is trained only"


def _without_repeated_sizes(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without fields that say again how large a head is, and which part of it turns.

    Raises ModelError where they disagree with the others.
    """
    left, rope = dict(config), dict(config["rope_parameters"])
    given = {"head_dim": left.pop("head_dim", None), "partial_rotary_factor": rope.pop("partial_rotary_factor", None)}
    sizes = latent.read_latent(path, left)
    wanted = {"head_dim": sizes.query_head, "partial_rotary_factor": sizes.turned / sizes.query_head}
    for field, value in given.items():
        if value is not None and value != wanted[field]:
            raise unsupported(path, field, value, f"{wanted[field]}, as qk_nope_head_dim and qk_rope_head_dim say")
    return left | {"rope_parameters": rope}


FAMILY = Mistral4(
    "Mistral4",
    FamilyFields(
        read=(grouped_experts.FIELDS | latent.FIELDS) - {"num_mtp_layers", "num_nextn_predict_layers"},
        types={"output_router_logits": (bool,)},
        only=NO_ATTENTION_BIAS
        | {"partial_rotary_factor": None, "rope_interleave": True, "rope_scaling": None, "sliding_window": None}
        | {"rms_norm_eps": 1e-6},  # transformers' epsilon of latents
        never_null=(*NEVER_NULL, *grouped_experts.NEVER_NULL, "n_group", "topk_group", "norm_topk_prob"),
        absent={"num_key_value_heads": 32},
    ),
    expert_names=grouped_experts.NAMES,
    max_positions=1048576,
    scalings={"yarn": SCALINGS["yarn"]},
    has_rollout_table=False,
    joint_adapters=True,
)
