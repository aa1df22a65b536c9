"""Families of dense layers: what their parts add to the weight map, and configs that would make other models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from published_dense import AFM, APERTUS, ERNIE, EXAONE4, GLM4, GRANITE4, OLMO2, OLMO3, PHI3, PHI35, YOUTU
from rlhf_megatron.models.architecture import ModelError, check_generates, parse_architecture
from rlhf_megatron.models.attention import causal_attention
from rlhf_megatron.models.description import WIDEST_HEAD
from rlhf_megatron.models.rectangles import Implementation
from rlhf_megatron.models.weight_map import megatron_blocks, tensor_shapes
from rlhf_megatron.topology.layout import Layout
from shards import checkpoint, filled

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    "intermediate_size": 96,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "apertus": SIZES | {"rope_parameters": {"rope_type": "default"}},
    "arcee": SIZES | {"mlp_bias": True},
    "cohere": SIZES | {"use_qk_norm": True, "tie_word_embeddings": False},
    "ernie4_5": SIZES | {"head_dim": 16, "tie_word_embeddings": False},
    "exaone4": SIZES,
    "gemma4_text": SIZES
    | {"head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    | {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 8, "tie_word_embeddings": False}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4": SIZES | {"head_dim": 16},
    "granitemoehybrid": SIZES
    | {"layer_types": ["attention"] * 4, "num_local_experts": 0, "shared_intermediate_size": 96, "mamba_n_heads": 4},
    "hunyuan_v1_dense": SIZES | {"head_dim": 16},
    "llama": SIZES | {"attention_bias": True, "mlp_bias": True},
    "olmo2": SIZES,
    "olmo3": SIZES | {"attention_bias": True},
    "phi3": SIZES,
    "seed_oss": SIZES | {"head_dim": 16, "attention_out_bias": True},
    "youtu": SIZES
    | {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    | {"num_key_value_heads": 4, "tie_word_embeddings": False},
}


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(pipeline=2, virtual_pipeline=2)], ids=str)
def test_every_element_is_held_once(layout: Layout, implementation: Implementation, family: str) -> None:
    a = parse_architecture({"model_type": family} | SMALL[family], "here")
    a.check_layout(layout)
    seen = {name: torch.zeros(shape) for name, shape in tensor_shapes(a).items()}
    for position in range(layout.size):
        blocks = megatron_blocks(a, layout, position, implementation)
        for parameter in filled(blocks, checkpoint(a)).values():
            assert not parameter.isnan().any()
        for block in blocks:
            seen[block.tensor][tuple(slice(*span) for span in block.region)] += 1
    for name, count in seen.items():
        of_heads = (a.wide_query_key_norm or a.head_norms) and ("q_norm" in name or "k_norm" in name)
        ends = ("o_proj.bias", "down_proj.bias", ".alpha_p", ".alpha_n", ".beta", ".eps", ".layer_scalar")
        is_whole = ("norm" in name and not of_heads) or name.endswith(ends)
        is_whole = is_whole or "_a_proj" in name  # down to latents
        assert (count == (layout.tensor if is_whole else 1)).all(), name


def test_keys_that_are_normed_together_are_not_shared_by_ranks() -> None:
    a = parse_architecture({"model_type": "olmo2"} | SIZES, "here")
    with pytest.raises(ModelError, match="^layout.tensor=4 does not divide the model's 2 key-value heads .* normed"):
        a.check_layout(Layout(tensor=4))


def test_heads_of_layers_without_a_window_are_not_shared_by_ranks() -> None:
    a = parse_architecture({"model_type": "gemma4_text"} | SMALL["gemma4_text"], "here")
    with pytest.raises(ModelError, match="^layout.tensor=4 does not divide the model's 2 key-value heads of layers wi"):
        a.check_layout(Layout(tensor=4))


def test_wide_heads_attend_as_the_formula_says() -> None:
    draw, boundaries = torch.Generator().manual_seed(0), torch.tensor([0, 5, 12])
    query, key, value = (torch.randn(12, heads, 2 * WIDEST_HEAD, generator=draw) for heads in (4, 2, 2))
    found = causal_attention(query, key, value, boundaries, 7, scale=0.05, window=3)
    for first, end in ((0, 5), (5, 12)):
        for head in range(4):
            products = 0.05 * query[first:end, head].double() @ key[first:end, head // 2].double().T
            far = torch.ones_like(products, dtype=torch.bool)
            weights = products.masked_fill(far.triu(1) | far.tril(-3), -torch.inf).softmax(-1)
            expected = (weights @ value[first:end, head // 2].double()).float()
            torch.testing.assert_close(found[first:end, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "fields", "said"),
    [
        (OLMO2, {"sliding_window": 4096}, "sliding_window is 4096"),
        (OLMO2, {"clip_qkv": 8.0}, "clip_qkv is 8.0, which this version does not know"),
        (OLMO3, {"rope_theta": 10000.0}, "rope_theta is 10000.0, which is not supported; supported: 500000.0"),
        (OLMO3, {"sliding_window": None}, "sliding_window is null"),
        (OLMO3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .* an object of full_attention and"),
        (ERNIE, {"use_bias": True}, "use_bias is True"),
        (EXAONE4, {"sliding_window": None}, "sliding_window is None, .* null where no layer has a window"),
        (EXAONE4, {"layer_types": ["full_attention"] * 64}, "sliding_window is 4096, .* null where no layer"),
        (EXAONE4, {"layer_types": None}, "layer_types is None"),
        (EXAONE4, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        (AFM, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        (APERTUS, {"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
        (APERTUS, {"post_norm": True}, "post_norm is True"),
        (APERTUS, {"qk_norm": False}, "qk_norm is False"),
        (APERTUS, {"mlp_bias": True}, "mlp_bias is True"),
        (APERTUS, {"rope_scaling": None}, "rope_parameters is missing; add it .transformers would scale by llama3"),
        (GRANITE4, {"layer_types": ["mamba"] * 36 + ["attention"] * 4}, "layer_types is .* without Mamba"),
        (GRANITE4, {"num_local_experts": 72}, "num_local_experts is 72"),
        (GRANITE4, {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        (GRANITE4, {"mamba_d_head": 32}, "mamba_n_heads is 80"),
        (GLM4, {"partial_rotary_factor": 0.26}, "partial_rotary_factor is 0.26"),
        (PHI35, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.type is 'yarn'.* default, longrope"),
        (PHI35, {"rope_scaling": {"type": "su"}}, "rope_scaling.type is 'su'"),
        (PHI35, {"partial_rotary_factor": 0.75}, "rope_scaling.short_factor has 48 numbers, and 36 pairs"),
        (PHI3, {"lm_head_bias": True}, "lm_head_bias is True"),
        (PHI3, {"head_dim": 64}, "head_dim is 64"),
        (YOUTU, {"rope_interleave": False}, "rope_interleave is False"),
        (YOUTU, {"rope_interleave": None}, "rope_interleave is null"),
        (YOUTU, {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05"),
        (YOUTU, {"head_dim": 128}, "head_dim is 128; with latent attention it must be 64"),
        (OLMO2, {"auto_map": {"AutoConfig": "configuration_olmo2.Olmo2Config"}}, "auto_map is .* own"),
    ],
)
def test_what_would_be_another_model_is_refused(config: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=f"^here/config.json: {said}"):
        parse_architecture(config | fields, "here")


def test_yarn_is_for_layers_without_a_window() -> None:
    ropes = parse_architecture(OLMO3, "here").layer_ropes
    assert [rope is not None and rope.scaling is not None for rope in ropes] == [False, False, False, True] * 8


def test_granite_has_positions_where_its_config_says_so() -> None:
    assert not parse_architecture(GRANITE4, "here").mixed_ropes
    for said in (None, "nope"):
        read = parse_architecture(GRANITE4 | {"position_embedding_type": said}, "here")
        assert read.layer_ropes == (None,) * 40 and read.feed_forward == 8192


def test_biases_that_vllm_lacks_are_for_training_alone() -> None:
    config = {"model_type": "qwen3", "head_dim": 16, "attention_bias": True} | SIZES
    with pytest.raises(ModelError, match="attention_bias is true, and vLLM gives the output of attention in qwen3 no"):
        check_generates(parse_architecture(config, "here"), "here")
