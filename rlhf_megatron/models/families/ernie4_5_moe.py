"""ERNIE 4.5 with experts: a corrected choice by softmax, beside shared experts, in layers by an interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import LAYERS_LEFT_OUT, FamilyFields, size, unsupported
from rlhf_megatron.models.description import Architecture, Experts, LayerKind, Routing, SharedExpert
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS
from rlhf_megatron.models.families.ernie4_5 import Ernie
from rlhf_megatron.models.families.grouped_experts import whole_number
from rlhf_megatron.models.families.mixture import EXPERT_TYPES, ExpertNames
from rlhf_megatron.models.stacked import Stacked
from rlhf_megatron.untrusted import shown

# What transformers takes for absent fields.
_ABSENT = {
    "moe_k": 6, "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
}  # fmt: skip
_ONLY = {"moe_group_experts": False, "moe_norm_min": 1e-12, "moe_use_aux_free": True, "use_moe": True}
_TYPES: dict[str, tuple[type, ...]] = {
    "moe_capacity": (list,),
    "moe_gate": (str,),
    "moe_gate_act": (str,),
    "multi_token_pred_lambda": (float, int),
}
_MATRIX, _ROW = "moe_statics.e_score_correction_bias", "moe_statics.0.e_score_correction_bias"
_NAMES = ExpertNames(shared="shared_experts", correction=_ROW)


@dataclasses.dataclass(frozen=True)
class ErnieMoe(Ernie):
    """ERNIE's decoder, some of whose layers have experts; the weights of the chosen sum to 1."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        if "head_dim" in config and config["head_dim"] is None:
            raise unsupported(path, "head_dim", None, "a size, or no field (transformers takes null for a size)")
        config = _ABSENT | dict(config)
        plain = super().read(path, config)
        count, chosen = size(path, "moe_num_experts", config), size(path, "moe_k", config)
        if chosen > count:
            raise ModelError(f"{shown(path)}: moe_k is {chosen}, of {count} experts")
        width = size(path, "moe_intermediate_size", config)
        shared = whole_number(path, "moe_num_shared_experts", config) * width
        experts = Experts(
            count,
            chosen,
            width,
            normalized=True,
            shared=SharedExpert(shared, gated=False) if shared else None,
            routing=Routing("softmax", corrected=True),
        )
        kinds = tuple(
            LayerKind("full", "experts" if has else "dense") for has in _layers_with_experts(path, config, plain.layers)
        )
        return dataclasses.replace(
            plain,
            experts=experts,
            mixed_layers=kinds if len(set(kinds)) > 1 else (),
            prediction_layers=whole_number(path, LAYERS_LEFT_OUT[0], config),
        )

    def stacked_tensors(self, architecture: Architecture) -> Mapping[str, Stacked]:
        """See Family: correction biases are a matrix of one row."""
        kinds = enumerate(architecture.layer_kinds)
        modules = [f"model.layers.{layer}.mlp." for layer, kind in kinds if kind.feed_forward == "experts"]
        return {module + _MATRIX: Stacked((module + _ROW,)) for module in modules}


def _layers_with_experts(path: Path, config: Mapping[str, Any], layers: int) -> list[bool]:
    """Return for each layer whether it has experts: every so many-th of those from a first to a last one."""
    first, interval = whole_number(path, "moe_layer_start_index", config), size(path, "moe_layer_interval", config)
    end = config["moe_layer_end_index"]
    last = layers - 1 if type(end) is int and end == -1 else whole_number(path, "moe_layer_end_index", config)
    has_experts = [first <= layer <= last and (layer + 1) % interval == 0 for layer in range(layers)]
    if not any(has_experts):
        raise unsupported(path, "moe_layer_start_index", first, "one by which some layer has experts")
    return has_experts


FAMILY = ErnieMoe(
    "Ernie4_5_Moe",
    FamilyFields(
        read=frozenset({*_ABSENT, "moe_intermediate_size", LAYERS_LEFT_OUT[0]}),
        types=EXPERT_TYPES | _TYPES,
        only=NO_ATTENTION_BIAS | {"use_bias": False, "sliding_window": None} | _ONLY,
        never_null=(*_ABSENT, "moe_intermediate_size"),
        absent={"num_key_value_heads": 4},
        native=True,
    ),
    expert_names=_NAMES,
    max_positions=131072,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
    has_rollout_table=False,
)
