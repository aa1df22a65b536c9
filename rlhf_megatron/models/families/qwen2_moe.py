"""Qwen1.5-MoE and Qwen2-57B-A14B: experts beside a shared one behind a gate, and dense layers where the config says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, brief, size, unsupported
from rlhf_megatron.models.description import Architecture, SharedExpert
from rlhf_megatron.models.families.decoder import Decoder
from rlhf_megatron.models.families.mixture import EXPERT_FIELDS, EXPERT_TYPES
from rlhf_megatron.models.families.windows import SWITCH, WindowFields
from rlhf_megatron.untrusted import shown


@dataclasses.dataclass(frozen=True)
class Qwen2Moe(Decoder):
    """The usual decoder, whose experts are not in every layer and not alone."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, config)
        assert plain.experts is not None
        shared = SharedExpert(size(path, "shared_expert_intermediate_size", config), gated=True)
        dense = dense_layers(path, config, plain.layers)
        kinds = tuple(
            dataclasses.replace(kind, feed_forward="dense") if layer in dense else kind
            for layer, kind in enumerate(plain.layer_kinds)
        )
        return dataclasses.replace(
            plain,
            experts=dataclasses.replace(plain.experts, shared=shared),
            mixed_layers=kinds if len(set(kinds)) > 1 else (),
        )


def dense_layers(path: Path, config: Mapping[str, Any], layers: int) -> set[int]:
    """Return the layers without experts: every ``decoder_sparse_step``-th has them, but for the ``mlp_only_layers``."""
    dense, step = config.get("mlp_only_layers") or [], size(path, "decoder_sparse_step", config, 1)
    if not isinstance(dense, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in dense):
        raise ModelError(
            f"{shown(path)}: mlp_only_layers is {brief(dense)}; it must be a list of layers, 0 to {layers - 1}"
        )
    without = {layer for layer in range(layers) if layer in dense or (layer + 1) % step}
    if len(without) == layers:
        field = "mlp_only_layers" if dense else "decoder_sparse_step"
        raise unsupported(path, field, config[field], "one by which some layer has experts")
    return without


FAMILY = Qwen2Moe(
    "Qwen2Moe",
    FamilyFields(
        read=SWITCH | EXPERT_FIELDS | {"shared_expert_intermediate_size", "decoder_sparse_step", "mlp_only_layers"},
        types=EXPERT_TYPES,
        only={"qkv_bias": True},
        never_null=("head_dim", "moe_intermediate_size", "num_key_value_heads", "qkv_bias"),
        absent={"num_key_value_heads": 16},
    ),
    windows=WindowFields(absent=4096, switch=True, layers="alternate", by_type=True),
    qkv_bias=True,
    experts=True,
    vllm_divides_heads=True,
    has_rollout_table=False,
)
