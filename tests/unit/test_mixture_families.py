"""Families of experts: what their configs say, and what would be another model."""

from __future__ import annotations

from typing import Any

import pytest

from published_configs import A13B, GEMMA4_26B, MISTRAL4, PUBLISHED
from published_configs import ERNIE_21B as ERNIE
from published_dense import DOTS, GRANITE_MOE, K_EXAONE, SOLAR_OPEN
from rlhf_megatron.models.architecture import ModelError, check_generates, parse_architecture
from rlhf_megatron.models.description import Experts, Routing, SharedExpert
from rlhf_megatron.models.rope import AlphaScaling
from rlhf_megatron.planning.parameters import active_parameters, model_parameters

HUNYUAN, OLMOE = PUBLISHED["Hunyuan-7B-Instruct"], PUBLISHED["OLMoE-1B-7B-0125"]
MINIMAX = PUBLISHED["MiniMax-M2.5"]


@pytest.mark.parametrize(
    ("config", "billions", "active"),
    # ERNIE's leave the output layer out of the active.
    [
        (A13B, 80.4, 13.0),
        (ERNIE, 21.8, 3 + 0.26),
        (OLMOE, 6.92, 1.28),
        (MINIMAX, 228.7, 11.0),
        (DOTS, 142.8, 14.0),
        (SOLAR_OPEN, 102.6, 12.0),
        (K_EXAONE, 236.0, 23.0),
        (GRANITE_MOE, 3.3, 0.88),
        (MISTRAL4, 119.0, 6.5),
        (GEMMA4_26B, 25.2, 3.8),
    ],
    ids=[
        "Hunyuan-A13B",
        "ERNIE-4.5-21B-A3B",
        "OLMoE",
        "MiniMax-M2.5",
        "dots.llm1",
        "Solar Open",
        "K-EXAONE",
        "Granite 3.1 3B A800M",
        "Mistral Small 4",
        "Gemma 4 26B A4B",
    ],
)
def test_mixtures_have_the_parameters_that_their_makers_count(
    config: dict[str, Any], billions: float, active: float
) -> None:
    read = parse_architecture(config, "here")
    assert model_parameters(read) / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_parameters(read) / 1e9 == pytest.approx(active, rel=0.05)


def test_what_the_configs_say() -> None:
    dense, mixture = parse_architecture(HUNYUAN, "here"), parse_architecture(A13B, "here")
    for read in (dense, mixture):
        assert read.query_key_norm and read.norms_of_turned
        assert read.rope.theta == 10000.0 and read.rope.scaling == AlphaScaling(1000.0)
    assert mixture.experts == Experts(64, 8, 3072, normalized=True, shared=SharedExpert(3072, gated=False))
    of_images = {
        "anyres_pooling_size": 2, "anyres_vit_max_image_size": None, "anyres_vit_two_views": False,
        "num_media_embeds": 257, "position_embedding_xdrope": False, "skip_cls_token": False,
        "vit_mapping_type": "resampler", "vit_patch": 1, "vit_path": None, "xdrope_section": None,
    }  # fmt: skip
    assert parse_architecture(A13B | of_images, "here") == mixture
    ernie = parse_architecture(ERNIE, "here")
    assert ernie.experts == Experts(
        64,
        6,
        1536,
        normalized=True,
        shared=SharedExpert(3072, gated=False),
        routing=Routing("softmax", corrected=True),
    )
    assert [kind.feed_forward for kind in ernie.layer_kinds] == ["dense"] + ["experts"] * 27
    assert ernie.prediction_layers == 1 and ernie.rope.interleaved
    third = ERNIE | {"moe_layer_interval": 3, "moe_layer_end_index": -1}
    kinds = parse_architecture(third, "here").layer_kinds
    assert [layer for layer, kind in enumerate(kinds) if kind.feed_forward == "experts"] == [*range(2, 28, 3)]
    olmoe = parse_architecture(OLMOE, "here")
    assert olmoe.experts == Experts(64, 8, 1024, normalized=False) and olmoe.wide_query_key_norm


GEMMA4 = GEMMA4_26B["text_config"]
ALPHA, YARN = HUNYUAN["rope_scaling"], MISTRAL4["rope_parameters"]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (HUNYUAN, {"head_dim": None}, "head_dim is missing; add it"),
    (HUNYUAN, {"rope_scaling": ALPHA | {"factor": 2.0}}, "rope_scaling.factor is 2.0.*; supported: 1.0 beside alpha"),
    (HUNYUAN, {"rope_scaling": {"type": "dynamic", "factor": 1.0}}, "rope_scaling.alpha is missing"),
    (HUNYUAN, {"rope_scaling": ALPHA | {"alpha": 0}}, "alpha is 0; it must be a number above 0"),
    (HUNYUAN, {"rope_scaling": ALPHA | {"beta": 1}}, "rope_scaling.beta is 1"),
    (PUBLISHED["Qwen3-0.6B"], {"rope_scaling": ALPHA}, "rope_scaling.rope_type is 'dynamic'"),
    (HUNYUAN, {"use_cla": True}, "use_cla is True"),
    (HUNYUAN, {"use_qk_norm": False}, "use_qk_norm is False"),
    (HUNYUAN, {"norm_type": "layer"}, "norm_type is 'layer'"),
    (A13B, {"moe_topk": [8] * 31 + [4]}, "moe_topk is .*; supported: one number in all layers"),
    (A13B, {"moe_topk": [8] * 31}, "moe_topk is"),
    (A13B, {"moe_topk": 65}, "moe_topk is 65, of 64 experts"),
    (A13B, {"moe_topk": None}, "moe_topk is null"),
    (A13B, {"num_experts": [64] * 32}, "num_experts is"),
    (A13B, {"moe_intermediate_size": 2048}, "moe_intermediate_size is 2048"),
    (A13B, {"num_shared_expert": 2}, "num_shared_expert is 2"),
    (A13B, {"norm_topk_prob": False}, "norm_topk_prob is False"),
    (A13B, {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe is False"),
    (A13B, {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1"),
    (A13B, {"n_group": 2}, "n_group is 2, which is not supported; supported: False"),
    (ERNIE, {"moe_k": 65}, "moe_k is 65, of 64 experts"),
    (ERNIE, {"moe_norm_min": 1e-3}, "moe_norm_min is 0.001"),
    (ERNIE, {"moe_layer_start_index": 28}, "moe_layer_start_index is 28"),
    (ERNIE, {"moe_layer_end_index": None}, "moe_layer_end_index is null"),
    (ERNIE, {"head_dim": None}, "head_dim is None"),
    (ERNIE, {"use_bias": True}, "use_bias is True"),
    (ERNIE, {"moe_use_aux_free": False}, "moe_use_aux_free is False"),
    (ERNIE, {"norm_topk_prob": True}, "norm_topk_prob is True, which this version does not know"),
    (MINIMAX, {"scoring_func": None}, "scoring_func is missing; add 'sigmoid'"),
    (MINIMAX, {"use_routing_bias": False}, "use_routing_bias is False"),
    (MINIMAX, {"rotary_dim": 3}, "partial_rotary_factor is 0.02"),
    (MINIMAX, {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, .*rotary_dim / head_dim"),
    (MINIMAX, {"attn_type_list": [1] * 61 + [0]}, "attn_type_list is .* attention, in every layer"),
    (MINIMAX, {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
    (MINIMAX, {"num_experts_per_tok": 257}, "num_experts_per_tok is 257, of 256 experts"),
    (GRANITE_MOE, {"num_experts_per_tok": 41}, "num_experts_per_tok is 41, of 40 experts"),
    (DOTS, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    (DOTS, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
    (MISTRAL4, {"head_dim": 64}, "head_dim is 64, .*; supported: 128, as qk_nope_head_dim"),
    (MISTRAL4, {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
    (MISTRAL4, {"rope_parameters": YARN | {"rope_type": "linear", "type": "linear"}}, "rope_parameters.rope_type is"),
    (MISTRAL4, {"rope_parameters": None}, "rope_parameters is None"),
    (MISTRAL4, {"rope_interleave": False}, "rope_interleave is False"),
    (MISTRAL4, {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
    (MISTRAL4, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, of 128 experts"),
    (K_EXAONE, {"architectures": ["Exaone4ForCausalLM"]}, "architectures is .*ExaoneMoeForCausalLM"),
    (K_EXAONE, {"is_moe_layer": [True] * 48}, "is_moe_layer is .* as mlp_layer_types or first_k_dense_replace says"),
    (K_EXAONE, {"first_last_k_dense_replace": 2}, "first_last_k_dense_replace is 2"),
    (K_EXAONE, {"mlp_layer_types": ["sparse"] * 47 + ["dense"]}, "mlp_layer_types is .* dense layers, then sparse"),
    (K_EXAONE, {"sliding_window": None}, "sliding_window is null"),
    (K_EXAONE, {"num_experts": None}, "num_experts is"),
    (K_EXAONE, {"swiglu_limits": [0] * 48}, "swiglu_limits is .* which this version does not know"),
    (SOLAR_OPEN, {"first_k_dense_replace": 1}, "first_k_dense_replace is 1"),
    (GEMMA4, {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    (GEMMA4, {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256, .*; supported: 0, no embedd"),
    (GEMMA4, {"enable_moe_block": False}, "num_experts is 128, .*; supported: null without enable_moe_block"),
    (GEMMA4, {"top_k_experts": 129}, "top_k_experts is 129, of 128 experts"),
    (GEMMA4, {"top_k_experts": None}, "top_k_experts is None"),
    (GEMMA4, {"expert_intermediate_size": 704}, "expert_intermediate_size is 704, which this version does not know"),
    (GEMMA4, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which this version does not know"),
    (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', .*; supported: null, visi"),
    (GEMMA4, {"layer_types": ["sliding_attention"] * 30}, "layer_types is .*; supported: full_attention in the last"),
    (GEMMA4, {"sliding_window": 262144}, "sliding_window is 262144, .*; supported: less than max_position_embedd"),
    (GEMMA4, {"global_head_dim": 511}, "global_head_dim is 511, .*; supported: an even number"),
    (GEMMA4, {"num_global_key_value_heads": 3}, "num_global_key_value_heads is 3, .*; supported: a divisor of 16"),
    (GEMMA4, {"per_layer_config": {"5": {"head_dim": 512}}}, "per_layer_config is .* of all layers without a window"),
    (GEMMA4, {"rope_parameters": {}}, "rope_parameters is .* each with rope_type and rope_theta"),
    (GEMMA4, {"rope_theta": 1e4}, "rope_theta is 10000.0, .*; supported: none; rope_parameters says it by the type"),
    (SOLAR_OPEN, {"use_qk_norm": True}, "use_qk_norm is True"),
    (SOLAR_OPEN, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    (SOLAR_OPEN, {"num_mtp_layers": 1}, "num_mtp_layers is 1, which this version does not know"),
    (OLMOE, {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    (OLMOE, {"head_dim": 64}, "head_dim is 64"),
    (OLMOE, {"moe_intermediate_size": 512}, "moe_intermediate_size is 512"),
    (OLMOE, {"num_experts_per_tok": 65}, "num_experts_per_tok is 65, of 64 experts"),
]


@pytest.mark.parametrize(("config", "change", "told"), REFUSED, ids=[told[:40] for _, _, told in REFUSED])
def test_what_would_be_another_model_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=f"^here/config.json: {told}"):
        parse_architecture(config | change, "here")


def test_layers_of_experts_by_their_list() -> None:
    former = {"first_last_k_dense_replace": None, "is_moe_layer": None}
    listed = K_EXAONE | former | {"mlp_layer_types": ["dense"] + ["sparse"] * 47, "first_k_dense_replace": 9}
    read = parse_architecture(listed, "here")
    assert read == parse_architecture(K_EXAONE, "here") and read.prediction_layers == 1
    assert [rope is None for rope in read.layer_ropes] == [False, False, False, True] * 12


def test_the_width_of_layers_that_are_not_there_may_be_absent() -> None:
    absent = {field: value for field, value in SOLAR_OPEN.items() if field != "intermediate_size"}
    read, without = parse_architecture(SOLAR_OPEN, "here"), parse_architecture(absent, "here")
    assert model_parameters(read) == model_parameters(without)
    with pytest.raises(ModelError, match="vLLM has no solar_open; it is trained only"):
        check_generates(read, "here")


@pytest.mark.parametrize(("change", "told"), [({"norm_topk_prob": True}, "norm_topk"), ({"rms_norm_eps": 1e-6}, "rms")])
def test_what_vllm_would_compute_otherwise_is_not_generated(change: dict[str, Any], told: str) -> None:
    check_generates(parse_architecture(OLMOE, "here"), "here")
    with pytest.raises(ModelError, match=told):
        check_generates(parse_architecture(OLMOE | change, "here"), "here")
