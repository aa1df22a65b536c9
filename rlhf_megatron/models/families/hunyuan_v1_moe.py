"""Hunyuan with experts, in every layer and beside a shared one of their size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import FamilyFields, size, unsupported
from rlhf_megatron.models.description import Architecture, Experts, SharedExpert
from rlhf_megatron.models.families import hunyuan_fields
from rlhf_megatron.models.families.bias_fields import BiasFields
from rlhf_megatron.models.families.hunyuan_v1_dense import Hunyuan
from rlhf_megatron.models.families.mixture import EXPERT_TYPES, ExpertNames
from rlhf_megatron.untrusted import shown

_OF_LAYERS = ("moe_intermediate_size", "moe_topk", "num_shared_expert")
# Of models of images that have the same class in their makers' code.
_OF_IMAGES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        (
            "anyres_pooling_size", "image_token_id", "num_media_embeds", "video_end_id", "video_start_id",
            "vit_input_resolution", "vit_patch", "vit_token",
        ),
        (int,),
    ),
    **dict.fromkeys(
        (
            "anyres_vit_two_views", "skip_cls_token", "vit_add_patchemb_bias", "vit_remove_prenorm",
            "vit_used_rms_norm",
        ),
        (bool,),
    ),
    **dict.fromkeys(("vit_mapping_type", "vit_norm_type"), (str,)),
}  # fmt: skip
_ONLY = {
    "group_limited_greedy": False,
    "moe_drop_tokens": False,
    "moe_layer_num_skipped": 0,
    "moe_random_routing_dropped_token": False,
    "n_group": False,
    "norm_topk_prob": True,
    "position_embedding_xdrope": False,
    "routed_scaling_factor": False,
    "topk_group": False,
    "use_mla": False,
    "use_mixed_mlp_moe": True,
}


@dataclasses.dataclass(frozen=True)
class HunyuanMoe(Hunyuan):
    """Hunyuan's decoder; ``intermediate_size`` is an expert's, and the weights of the chosen sum to 1."""

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        plain = super().read(path, config)
        given = {field: _of_all_layers(path, field, config, plain.layers) for field in _OF_LAYERS}
        given = {field: value for field, value in given.items() if value is not None}
        width = size(path, "moe_intermediate_size", given, plain.feed_forward)
        if width != plain.feed_forward:
            raise unsupported(path, "moe_intermediate_size", width, "intermediate_size, which transformers takes")
        if size(path, "num_shared_expert", given, 1) != 1:
            raise unsupported(path, "num_shared_expert", given["num_shared_expert"], "1")
        count, chosen = size(path, "num_experts", config, 1), size(path, "moe_topk", given, 1)
        if chosen > count:
            raise ModelError(f"{shown(path)}: moe_topk is {chosen}, of {count} experts")
        shared = SharedExpert(width, gated=False)
        return dataclasses.replace(plain, experts=Experts(count, chosen, width, normalized=True, shared=shared))


def _of_all_layers(path: Path, field: str, config: Mapping[str, Any], layers: int) -> Any:
    """Return a field that may be a list with a value for each layer; raises ModelError where these differ."""
    value = config.get(field)
    if not isinstance(value, list):
        return value
    if len(value) < layers or any(type(other) is not int or other != value[0] for other in value[:layers]):
        raise unsupported(path, field, value, "one number in all layers")
    return value[0]


FAMILY = HunyuanMoe(
    "HunYuanMoEV1",
    FamilyFields(
        read=hunyuan_fields.READ | {*_OF_LAYERS, "num_experts"},
        types=hunyuan_fields.TYPES | EXPERT_TYPES | _OF_IMAGES,
        only=hunyuan_fields.ONLY | _ONLY,
        never_null=("moe_topk",),
        native=True,
    ),
    query_key_norm=True,
    bias_fields=BiasFields(qkv="attention_bias", output="attention_bias"),
    expert_names=ExpertNames(router="gate.wg", shared="shared_mlp"),
    max_positions=2048,
    norm_epsilon=1e-5,
    norms=hunyuan_fields.NORMS,
    scalings=hunyuan_fields.ROPES,
    has_rollout_table=False,
)
