"""Mixtures under DeepSeek's names in config.json: experts in groups, shared ones, and dense layers in front."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import LAYERS_LEFT_OUT, brief, flag, number, size, unsupported
from rlhf_megatron.models.description import Architecture, Experts, LayerKind, Routing, SharedExpert
from rlhf_megatron.models.families.mixture import ExpertNames
from rlhf_megatron.untrusted import shown

FIELDS = frozenset(
    {
        "first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts", "n_shared_experts",
        "norm_topk_prob", "num_experts_per_tok", "routed_scaling_factor", "topk_group", *LAYERS_LEFT_OUT,
    }
)  # fmt: skip
NEVER_NULL = ("n_routed_experts", "n_shared_experts", "routed_scaling_factor")
NAMES = ExpertNames(shared="shared_experts")
CORRECTED_SIGMOID = Routing("sigmoid", corrected=True, counted_of_group=2)  # DeepSeek-V3's choice


def whole_number(path: Path, field: str, config: Mapping[str, Any], default: int = 0) -> int:
    """Return a field that counts from 0; ``default`` is for one that is absent or null."""
    value = config.get(field)
    if value is None:
        return default
    return 0 if value == 0 and type(value) is int else size(path, field, config)


def read_experts(path: Path, config: Mapping[str, Any], routing: Routing) -> Experts:
    """Return the mixture of a config, whose groups and scale complete ``routing``.

    Raises ModelError where a token would reach more experts than its groups have.
    """
    count, chosen = size(path, "n_routed_experts", config), size(path, "num_experts_per_tok", config)
    groups, kept = size(path, "n_group", config, 1), size(path, "topk_group", config, 1)
    if count % groups or kept > groups:
        raise ModelError(f"{shown(path)}: n_group is {groups} and topk_group {kept}, of {count} experts")
    if chosen > count // groups * kept:
        within = f" in {kept} of {groups} groups" if groups > 1 else ""
        raise ModelError(f"{shown(path)}: num_experts_per_tok is {chosen}, of {count} experts{within}")
    if type(config.get("routed_scaling_factor", 1.0)) is int:  # which transformers refuses
        raise unsupported(path, "routed_scaling_factor", config["routed_scaling_factor"], "a number with a point")
    width = size(path, "moe_intermediate_size", config)
    routing = dataclasses.replace(
        routing, groups=groups, chosen_groups=kept, scale=number(path, "routed_scaling_factor", config, 1.0)
    )
    shared = SharedExpert(size(path, "n_shared_experts", config) * width, gated=False)
    return Experts(count, chosen, width, flag(path, "norm_topk_prob", config), shared, routing)


def with_experts(path: Path, config: Mapping[str, Any], plain: Architecture, experts: Experts) -> Architecture:
    """Return ``plain`` with ``experts`` in all layers but the first ``first_k_dense_replace``.

    The layers for multi-token prediction that a checkpoint has behind the others are left out.
    """
    dense = whole_number(path, "first_k_dense_replace", config)
    if dense >= plain.layers:
        raise unsupported(path, "first_k_dense_replace", dense, f"fewer than the {plain.layers} layers")
    kinds = tuple(
        LayerKind(kind.attention, "dense" if layer < dense else "experts")
        for layer, kind in enumerate(plain.layer_kinds)
    )
    predictions = {whole_number(path, field, config) for field in LAYERS_LEFT_OUT if config.get(field) is not None}
    if len(predictions) > 1:
        raise ModelError(
            f"{shown(path)}: num_mtp_layers is {brief(config['num_mtp_layers'])} and num_nextn_predict_layers "
            f"{brief(config['num_nextn_predict_layers'])}, which are one field; remove one"
        )
    return dataclasses.replace(
        plain,
        experts=experts,
        mixed_layers=kinds if len(set(kinds)) > 1 else (),
        prediction_layers=max(predictions, default=0),
    )
