"""Granite 3 with experts, whose checkpoints have a layer's experts in two tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, size
from rlhf_megatron.models.description import Architecture, Experts
from rlhf_megatron.models.families import granite
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS
from rlhf_megatron.models.families.mixture import EXPERT_TYPES, ExpertNames
from rlhf_megatron.models.stacked import Stacked
from rlhf_megatron.untrusted import shown

# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"num_local_experts": 8, "num_experts_per_tok": 2}
# A layer's tensors in a checkpoint, and those matrices of an expert that are rows of it, in this order.
_STACKS = {"input_linear": ("gate_proj", "up_proj"), "output_linear": ("down_proj",)}


@dataclasses.dataclass(frozen=True)
class GraniteMoe(granite.Granite):
    """Granite's decoder; ``intermediate_size`` is an expert's, and the weights of the chosen sum to 1."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        config = _ABSENT | dict(config)
        plain = super().read(path, config)
        count, chosen = (size(path, field, config) for field in _ABSENT)
        if chosen > count:
            raise ModelError(f"{shown(path)}: num_experts_per_tok is {chosen}, of {count} experts")
        return dataclasses.replace(plain, experts=Experts(count, chosen, plain.feed_forward, normalized=True))

    def stacked_tensors(self, architecture: Architecture) -> Mapping[str, Stacked]:
        """See Family."""
        assert architecture.experts is not None
        experts = range(architecture.experts.count)
        return {
            f"{module}{stack}.weight": Stacked(
                tuple(f"{module}experts.{expert}.{matrix}.weight" for expert in experts for matrix in matrices),
                joined=len(matrices),
            )
            for module in (f"model.layers.{layer}.block_sparse_moe." for layer in range(architecture.layers))
            for stack, matrices in _STACKS.items()
        }


FAMILY = GraniteMoe(
    "GraniteMoe",
    FamilyFields(
        read=granite.FAMILY.fields.read | {*_ABSENT},
        types={**granite.FAMILY.fields.types, **EXPERT_TYPES},
        only=NO_ATTENTION_BIAS | {"sliding_window": None},
        never_null=(*granite.FAMILY.fields.never_null, *_ABSENT),
    ),
    expert_names=ExpertNames(module="block_sparse_moe", router="router.layer"),
    max_positions=2048,
    vllm_divides_heads=True,
    has_rollout_table=False,
)
