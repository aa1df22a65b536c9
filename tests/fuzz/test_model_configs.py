"""Whatever a config.json says, it is refused in one line, or transformers reads the same model from it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.architecture import Architecture, parse_architecture
from rlhf_megatron.models.config_fields import _ONLY, _TYPES, DECODER_FIELDS
from rlhf_megatron.models.families import delta_net_tensors, grouped_experts
from rlhf_megatron.models.families.mixture import EXPERT_FIELDS

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GEMMA3 = {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
GEMMA4 = {
    "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": 30.0, "global_head_dim": 64,
    "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"],
    "moe_intermediate_size": 32, "num_experts": 4, "num_global_key_value_heads": 1, "sliding_window": 16,
    "top_k_experts": 2,
}  # fmt: skip
GROUPED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
GRANITE = {
    "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3, "logits_scaling": 8.0,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "num_key_value_heads": 4, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
V3 = {"n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
WHOLE = {
    "apertus": SIZES | {"rope_parameters": {"rope_type": "default"}},
    "arcee": SIZES,
    "cohere": SIZES,
    "cohere2": SIZES | {"sliding_window": 16, "sliding_window_pattern": 2, "logit_scale": 0.5},
    "deepseek_v2": SIZES | GROUPED | LATENT | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": SIZES | GROUPED | LATENT | V3,
    "dots1": SIZES | GROUPED,
    "ernie4_5": SIZES,
    "ernie4_5_moe": SIZES | {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": SIZES | {"sliding_window_pattern": 4},
    "exaone_moe": SIZES | EXPERTS | {"sliding_window_pattern": 4},
    "gemma": SIZES,
    "gemma2": SIZES | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": None},
    "gemma3_text": SIZES | GEMMA3,
    "gemma4_text": SIZES | GEMMA4,
    "glm": SIZES,
    "glm4": SIZES,
    "glm4_moe_lite": SIZES | GROUPED | LATENT,
    "glm4_moe": SIZES | GROUPED,
    "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 7.0},
    "granite": SIZES | GRANITE,
    "granitemoe": SIZES | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": SIZES
    | GRANITE
    | {"layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_heads": 4},
    "hunyuan_v1_dense": SIZES,
    "hunyuan_v1_moe": SIZES | {"num_experts": 4, "moe_topk": 2},
    "llama": SIZES,
    "minimax_m2": SIZES
    | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}
    | {"scoring_func": "sigmoid", "use_routing_bias": True},
    "ministral3": SIZES | {"rope_parameters": MINISTRAL},
    "mistral": SIZES | {"sliding_window": None},
    "mistral4": SIZES | GROUPED | LATENT | {"head_dim": 24, "rope_parameters": MINISTRAL},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": SIZES,
    "olmo3": SIZES,
    "olmoe": SIZES | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "phi3": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "qwen3_5_moe_text": SIZES | EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_5_text": SIZES,
    "qwen3_moe": SIZES | EXPERTS,
    "qwen3_next": SIZES | EXPERTS | {"shared_expert_intermediate_size": 48},
    "seed_oss": SIZES,
    "smollm3": SIZES,
    "solar_open": SIZES | {field: value for field, value in GROUPED.items() if field != "first_k_dense_replace"},
    "youtu": SIZES | LATENT,
    "qwen2_moe": SIZES | EXPERTS | {"shared_expert_intermediate_size": 48},
}
OF_LAYERS = ["decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"]
FIELDS = [
    *sorted(DECODER_FIELDS | EXPERT_FIELDS | set(_ONLY) | set(_TYPES)),
    "sliding_window",
    "use_qk_norm",
    "qkv_bias",
]
FIELDS += [
    "layer_norm_eps",
    "logit_scale",
    "swiglu_alpha",
    "swiglu_limit",
    *GRANITE,
    *GEMMA3,
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
]
FIELDS += [*GEMMA4, "num_kv_shared_layers", "per_layer_config", "use_double_wide_mlp"]
FIELDS += [*sorted(delta_net_tensors.FIELDS), "partial_rotary_factor"]
FIELDS += ["num_local_experts", "position_embedding_type", "rotary_dim", "shared_intermediate_size", "mamba_n_heads"]
FIELDS += [*LATENT, *V3, *sorted(grouped_experts.FIELDS), *OF_LAYERS, "no_rope_layers", "no_rope_layer_interval"]
VALUES = st.sampled_from(
    [None, True, False, 0, 1, 2, 3, 4, 64, 99, 100, -1, 10**9, 10**30, 10**400, 0.0, 1.0, 0.5, 1e-6, 1e300, "", "silu",
     "false", "bfloat16", "torch.bfloat16", "\x1b\n", [], ["full_attention"] * 2, ["sliding_attention"] * 2, [1, 2],
     [0], [0, 1], [[]], {}, {"a": 1}, {"rope_type": "default", "rope_theta": 5e5}, {"type": "linear", "factor": 2.0},
     {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16},
     {"rope_type": "yarn", "factor": 2.0, "attn_factor": 0.8}, {"rope_type": "longrope", "factor": 2}]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=9), VALUES | JSON, max_size=3)


@given(st.sampled_from(sorted(WHOLE)), CHANGES, st.sets(st.sampled_from(FIELDS), max_size=2))
def test_a_config_is_refused_in_one_line_or_read_as_transformers_reads_it(
    kind: str, changes: dict[str, Any], absent: set[str]
) -> None:
    config = {"model_type": kind} | WHOLE[kind] | changes
    config = {field: value for field, value in config.items() if field not in absent}
    try:
        read = parse_architecture(config, "here")
    except ModelError as error:
        assert str(error).startswith("here/config.json: ") and str(error).isprintable() and len(str(error)) < 600
    else:
        agrees_with_transformers(read, config)


def agrees_with_transformers(read: Architecture, config: dict[str, Any]) -> None:
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    assert read.layers == theirs.num_hidden_layers
    assert read.hidden == theirs.hidden_size
    assert read.feed_forward == getattr(theirs, "shared_intermediate_size", theirs.intermediate_size)
    assert read.heads == theirs.num_attention_heads
    if read.full_heads:
        for layer, kind in enumerate(read.layer_kinds):
            own, of_layer = read.of_kind(kind), theirs.per_layer_config[layer]
            assert (own.key_value_heads, own.head_dim) == (of_layer.num_key_value_heads, of_layer.head_dim)
            assert own.keys_are_values == (theirs.attention_k_eq_v and kind.attention == "full")
    else:
        assert read.key_value_heads == theirs.num_key_value_heads
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        assert read.head_dim == (theirs.qk_rope_head_dim if read.latent else head_dim)
        assert read.latent is None or head_dim in (read.latent.turned, read.latent.query_head)
    assert read.vocabulary == theirs.vocab_size
    longest: int = theirs.max_position_embeddings
    if read.family in ("ministral3", "mistral4"):  # beyond these positions its queries grow
        longest = min(longest, theirs.rope_parameters["original_max_position_embeddings"])
    assert read.max_positions == longest
    epsilon = theirs.layer_norm_eps if read.family.startswith("cohere") else theirs.rms_norm_eps
    assert read.norm_epsilon == epsilon
    assert read.tied_embeddings == theirs.tie_word_embeddings
    of_type = theirs.rope_parameters if "full_attention" in theirs.rope_parameters else {}
    parameters = of_type.get("full_attention", theirs.rope_parameters)
    assert read.rope.theta == parameters["rope_theta"]
    assert (read.rope.scaling is None) == (parameters["rope_type"] == "default")
    if of_type:
        thetas = [of_type[kind]["rope_theta"] for kind in theirs.layer_types]
        assert [rope and rope.theta for rope in read.layer_ropes] == thetas
    if read.rope.scaling is None and read.latent is None:
        assert read.rope.rotated_fraction == theirs.rope_parameters.get("partial_rotary_factor", 1.0)
    turning = getattr(theirs, "no_rope_layers", [1] * read.layers)
    if read.family == "granitemoehybrid":
        turning = [theirs.position_embedding_type == "rope"] * read.layers
    if read.family == "cohere2":
        turning = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [rope is not None for rope in read.layer_ropes] == [turns == 1 for turns in turning[: read.layers]]
    activation = getattr(theirs, "hidden_activation", None) or theirs.hidden_act
    of_gemma = read.family == "gemma4_text" or (read.zero_centred_norms and not read.gated_attention)
    plain = "xielu" if read.family == "apertus" else "relu2"
    assert activation == ("gelu_pytorch_tanh" if of_gemma else plain if read.plain_mlp else "silu")
    if read.gated_attention:
        deltas = [kind == "linear_attention" for kind in theirs.layer_types]
        assert [kind.attention == "delta" for kind in read.layer_kinds] == deltas
        assert read.delta_net is None or read.delta_net.taps == theirs.linear_conv_kernel_dim
        assert read.rope.rotated_fraction == theirs.rope_parameters["partial_rotary_factor"]
    assert getattr(theirs, "is_causal", True)
    if read.family.startswith("granite"):
        assert read.scales.residual == theirs.residual_multiplier and read.scales.logits == 1 / theirs.logits_scaling
    if read.family in ("gemma2", "gemma3_text"):
        caps = theirs.attn_logit_softcapping, theirs.final_logit_softcapping
        assert (read.scales.attention_cap, read.scales.logit_cap) == caps
        assert read.scales.attention == theirs.query_pre_attn_scalar**-0.5
    within = [kind.attention == "window" for kind in read.layer_kinds]
    if getattr(theirs, "sliding_window", None) and theirs.sliding_window < read.max_positions:
        # qwen3_moe and mistral have one in every layer, whatever the types are said to be.
        types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * read.layers
        assert within == [kind == "sliding_attention" for kind in types]
        assert read.window == (theirs.sliding_window if any(within) else None)
    else:
        assert not any(within) and read.window is None
    if read.experts:
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        count = next(getattr(theirs, name) for name in names if getattr(theirs, name, None))
        beside_dense = read.experts.beside_dense
        assert not beside_dense or theirs.enable_moe_block
        per_token = theirs.top_k_experts if beside_dense else theirs.num_experts_per_tok  # a list, of Hunyuan's layers
        assert read.experts.count == count
        assert read.experts.chosen == (per_token[0] if isinstance(per_token, list) else per_token)
        assert read.experts.normalized == (beside_dense or getattr(theirs, "norm_topk_prob", True))
        assert read.experts.feed_forward == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
        # A mixture in a layer is what transformers builds there; see Qwen2MoeDecoderLayer and Qwen3MoeDecoderLayer.
        sparse = [
            layer not in getattr(theirs, "mlp_only_layers", [])
            and layer >= getattr(theirs, "first_k_dense_replace", getattr(theirs, "moe_layer_start_index", 0))
            and layer <= getattr(theirs, "moe_layer_end_index", layer)
            and (layer + 1) % getattr(theirs, "decoder_sparse_step", getattr(theirs, "moe_layer_interval", 1)) == 0
            for layer in range(read.layers)
        ]
        assert [kind.feed_forward == "experts" for kind in read.layer_kinds] == sparse
        shared = read.experts.shared.feed_forward if read.experts.shared else 0
        always = 1 if read.family == "hunyuan_v1_moe" else getattr(theirs, "moe_num_shared_experts", 0)
        always = getattr(theirs, "num_shared_experts", always)  # K-EXAONE's name
        count_shared = getattr(theirs, "n_shared_experts", always) * read.experts.feed_forward
        count_shared = theirs.intermediate_size if beside_dense else count_shared
        assert shared == getattr(theirs, "shared_expert_intermediate_size", count_shared)
        if read.experts.routing and read.family not in (
            "ernie4_5_moe",
            "gemma4_text",
            "minimax_m2",
        ):  # which have no groups
            groups = (theirs.n_group, theirs.topk_group, theirs.routed_scaling_factor)
            routing = read.experts.routing
            assert (routing.groups, routing.chosen_groups, routing.scale) == groups
