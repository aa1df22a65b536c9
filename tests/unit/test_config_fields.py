"""Configs of published models are read, and a config that would be another model is refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import published_configs
import published_dense
import published_fields
from published_fields import (
    COHERE,
    COHERE2,
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM,
    GLM_AIR,
    GLM_FLASH,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MISTRAL,
    MIXTRAL,
    MOONLIGHT,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_CODER,
    QWEN3_NEXT,
    SMOLLM3,
    without,
)
from rlhf_megatron.errors import RecipeError, RolloutError
from rlhf_megatron.models.architecture import (
    Experts,
    ModelError,
    Scales,
    check_generates,
    parse_architecture,
    read_architecture,
)
from rlhf_megatron.models.description import DeltaNet
from rlhf_megatron.planning.parameters import active_parameters, model_parameters
from rlhf_megatron.planning.report import plan_text
from rlhf_megatron.recipe import load_recipe
from rlhf_megatron.yarn import attention_factor

ROOT = Path(__file__).parents[2]
PUBLISHED = published_fields.PUBLISHED | published_dense.PUBLISHED
GEMMA4 = published_configs.PUBLISHED["gemma-4-31B-it, its language model"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_published_models_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    read, theirs = read_architecture(tmp_path), AutoConfig.from_pretrained(str(tmp_path))
    assert (read.layers, read.hidden, read.feed_forward, read.heads, read.key_value_heads) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
    )
    assert read.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    of_type = theirs.rope_parameters if "full_attention" in theirs.rope_parameters else {}
    full = of_type.get("full_attention", theirs.rope_parameters)
    assert read.rope.theta == full["rope_theta"]
    assert getattr(read.rope.scaling, "factor", None) == full.get("factor")
    if of_type:
        kinds = [of_type[kind] for kind in theirs.layer_types]
        assert [rope and rope.theta for rope in read.layer_ropes] == [given["rope_theta"] for given in kinds]
    turning = getattr(theirs, "no_rope_layers", [1] * read.layers)
    if read.family in ("cohere2", "exaone_moe") or name == "EXAONE 4.0 32B":
        turning = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [rope is not None for rope in read.layer_ropes] == [turns == 1 for turns in turning]
    assert read.tied_embeddings == theirs.tie_word_embeddings
    assert (read.vocabulary, read.max_positions) == (theirs.vocab_size, theirs.max_position_embeddings)
    of_layers = read.family.startswith("cohere")  # which have LayerNorm
    assert read.norm_epsilon == (theirs.layer_norm_eps if of_layers else theirs.rms_norm_eps)
    if of_layers:
        assert read.scales == Scales(logits=theirs.logit_scale) and read.rope.interleaved
    if read.family == "mixtral":
        assert read.experts == Experts(theirs.num_local_experts, theirs.num_experts_per_tok, 14336, normalized=True)
    has_windows = "sliding_attention" in (getattr(theirs, "layer_types", None) or ())
    has_windows |= name in ("Mistral 7B v0.1", "Phi-3 mini 4k")
    assert read.window == (theirs.sliding_window if has_windows else None)
    if read.family == "granite":
        assert read.scales == Scales(
            embedding=theirs.embedding_multiplier,
            attention=theirs.attention_multiplier,
            residual=theirs.residual_multiplier,
            logits=1.0 / theirs.logits_scaling,
        )
    if read.family in ("gemma", "gemma2", "gemma3_text"):
        assert (getattr(theirs, "hidden_activation", None) or theirs.hidden_act) == "gelu_pytorch_tanh"
    if read.family in ("gemma2", "gemma3_text"):
        assert read.scales == Scales(
            read.hidden**0.5,
            rounded_embedding=True,
            attention=theirs.query_pre_attn_scalar**-0.5,
            attention_cap=theirs.attn_logit_softcapping,
            logit_cap=theirs.final_logit_softcapping,
        )


def test_layers_with_a_delta_net_are_those_of_transformers() -> None:
    from transformers import Qwen3NextConfig

    read = parse_architecture(QWEN3_NEXT, "here")
    assert [kind.attention == "delta" for kind in read.layer_kinds] == [
        kind == "linear_attention" for kind in Qwen3NextConfig(**QWEN3_NEXT).layer_types
    ]
    assert read.delta_net == DeltaNet(16, 32, 128, 128, taps=4, by_key_head=True)
    assert read.rope.rotated_fraction == 0.25 and read.gated_attention and read.zero_centred_norms
    wrong = QWEN3_NEXT | {"layer_types": ["linear_attention"] * 47}
    for changed, expected in {
        "layer_types is": wrong,
        "layer_types is 'other', which is not supported": QWEN3_NEXT | {"layer_types": ["other"] * 48},
        "no multiple of linear_num_key_heads": QWEN3_NEXT | {"linear_num_value_heads": 24},
        "attn_output_gate is False": QWEN3_NEXT | {"attn_output_gate": False},
        "layer_scale is True": QWEN3_NEXT | {"layer_scale": True},
        "output_gate_type is 'sigmoid', .*; supported: silu, swish": QWEN3_NEXT | {"output_gate_type": "sigmoid"},
        "output_gate_type is None": QWEN3_NEXT | {"output_gate_type": None},  # which vLLM asserts away
    }.items():
        with pytest.raises(ModelError, match=changed):
            parse_architecture(expected, "here")
    assert parse_architecture(QWEN3_NEXT | {"output_gate_type": "swish"}, "here") == read


def test_queries_that_do_not_grow_leave_all_positions() -> None:
    devstral = published_configs.PUBLISHED["Devstral-2-123B-Instruct"]
    read = parse_architecture(devstral, "here")
    assert read.max_positions == 262144 and read.rope.attention_factor == attention_factor(64.0)
    growing = devstral | {"rope_parameters": devstral["rope_parameters"] | {"llama_4_scaling_beta": 0.1}}
    assert parse_architecture(growing, "here").max_positions == 4096
    for wrong in (False, -0.1, "0", None):
        changed = devstral | {"rope_parameters": devstral["rope_parameters"] | {"llama_4_scaling_beta": wrong}}
        with pytest.raises(ModelError, match="llama_4_scaling_beta"):
            parse_architecture(changed, "here")


@pytest.mark.parametrize(
    "config, billions, active",  # as their makers say, who leave GLM's embeddings and output layer out of the active
    [
        (QWEN3_NEXT, 79.7, 3.9),
        (MIXTRAL, 46.7, 12.9),
        (GLM, 353, 32 + 1.6),
        (GLM_AIR, 106, 12 + 1.2),
        (DEEPSEEK_V3, 671, 37),
        (DEEPSEEK_V2, 236, 21),
        (DEEPSEEK_V2_LITE, 15.7, 2.7),
        (MOONLIGHT, 16, 2.9),
        (GLM_FLASH, 30, 3.3 + 0.6),
    ],
    ids=[
        "Qwen3-Next",
        "Mixtral 8x7B",
        "GLM-4.5",
        "GLM-4.5-Air",
        "DeepSeek-V3",
        "DeepSeek-V2",
        "DeepSeek-V2-Lite",
        "Moonlight",
        "GLM-4.7-Flash",
    ],
)
def test_mixtures_have_the_parameters_that_their_makers_count(
    config: dict[str, Any], billions: float, active: float
) -> None:
    read = parse_architecture(config, "here")
    assert model_parameters(read) / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_parameters(read) / 1e9 == pytest.approx(active, rel=0.02)


SLIDING = {"use_sliding_window": True, "sliding_window": 4096}
WINDOWS: dict[str, tuple[dict[str, Any], list[int]]] = {  # and the layers with a window of 4096 tokens
    "mistral": (MISTRAL | {"sliding_window": 4096}, list(range(40))),
    "mistral, absent": (without(MISTRAL, "sliding_window"), list(range(40))),
    "mistral, as wide as the model": (MISTRAL | {"sliding_window": 1024000}, []),
    "mixtral": (MIXTRAL | {"sliding_window": 4096}, list(range(32))),
    "qwen2, none": (QWEN2 | SLIDING, []),
    "qwen2, last": (QWEN2 | SLIDING | {"max_window_layers": 21}, list(range(21, 28))),
    "qwen2, absent": (without(QWEN2, "sliding_window", "max_window_layers") | {"use_sliding_window": True}, []),
    "qwen2, null": (QWEN2 | SLIDING | {"sliding_window": None, "max_window_layers": 0}, []),
    "qwen2, as wide as the model": (QWEN2 | SLIDING | {"max_position_embeddings": 4096, "max_window_layers": 0}, []),
    "qwen3": (QWEN3 | SLIDING | {"max_window_layers": 0}, list(range(28))),
    "qwen3, by type": (
        QWEN3 | SLIDING | {"layer_types": ["full_attention", "sliding_attention"] * 14},
        [*range(1, 28, 2)],
    ),
    "qwen3_moe": (QWEN3_CODER | SLIDING, list(range(28))),
    "cohere2": (COHERE2, [layer for layer in range(32) if layer % 4 != 3]),
    "gpt_oss": (GPT_OSS | {"sliding_window": 4096}, list(range(0, 24, 2))),
    "gemma2": (GEMMA2, list(range(0, 26, 2))),
    "gemma3_text": (GEMMA3 | {"sliding_window": 4096}, [layer for layer in range(26) if layer % 6 != 5]),
    "gemma3_text, by type": (
        GEMMA3 | {"sliding_window": 4096, "layer_types": ["full_attention", "sliding_attention"] * 13},
        [*range(1, 26, 2)],
    ),
    "gemma3_text, absent": (
        without(GEMMA3, "sliding_window", "sliding_window_pattern", "layer_types"),
        [layer for layer in range(26) if layer % 6 != 5],
    ),
    "gemma4_text": (GEMMA4 | {"sliding_window": 4096}, [layer for layer in range(60) if layer % 6 != 5]),
    "gemma4_text, absent": (
        without(GEMMA4, "layer_types") | {"sliding_window": 4096},
        [layer for layer in range(60) if layer % 6 != 5],
    ),
    "qwen2_moe": (QWEN2_MOE | SLIDING | {"mlp_only_layers": [2], "max_window_layers": 9}, [0, 2, 4, 6, 8]),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_in_the_layers_where_transformers_has_them(name: str) -> None:
    from transformers import CONFIG_MAPPING

    config, layers = WINDOWS[name]
    read = parse_architecture(config, "here")
    assert [layer for layer, kind in enumerate(read.layer_kinds) if kind.attention == "window"] == layers
    assert read.window == (4096 if layers else None)
    assert bool(read.mixed_layers) == (0 < len(layers) < read.layers)
    theirs = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    if "as wide" not in name:
        types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * read.layers
        sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention" and theirs.sliding_window]
        assert sliding == layers
    if name == "qwen2_moe":
        assert [layer for layer, kind in enumerate(read.layer_kinds) if kind.feed_forward == "dense"] == [2]


@pytest.mark.parametrize("name", WINDOWS)
def test_vllm_has_a_window_in_all_layers_or_in_none_but_for_some_families(name: str) -> None:
    read = parse_architecture(WINDOWS[name][0], "here")
    if read.family == "cohere2" or name == "EXAONE 4.0 32B":
        with pytest.raises(ModelError, match="sliding_window is 4096, and vLLM's window has one token more in cohere2"):
            check_generates(read, "here")
        check_generates(parse_architecture(COHERE2 | {"max_position_embeddings": 4096}, "here"), "here")
        return
    if not read.mixed_layers or read.family in ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss"):
        check_generates(read, "here")
        return
    with pytest.raises(
        ModelError, match="^here/config.json: some layers have a sliding window, and vLLM has one in all"
    ):
        check_generates(read, "here")


def test_a_model_that_vllm_would_misread_generates_nothing() -> None:
    check_generates(parse_architecture(QWEN3 | {"head_dim": 32}, "here"), "here")
    check_generates(parse_architecture(QWEN2, "here"), "here")
    with pytest.raises(ModelError, match="tie_word_embeddings is false, and vLLM ties them in gemma2$"):
        check_generates(parse_architecture(GEMMA2 | {"tie_word_embeddings": False}, "here"), "here")
    with pytest.raises(ModelError, match="attn_logit_softcapping is set, and vLLM has no soft cap of attention in"):
        check_generates(parse_architecture(GEMMA3 | {"attn_logit_softcapping": 50.0}, "here"), "here")
    for config in (QWEN2, QWEN2_MOE):
        said = f"head_dim is 32, and vLLM takes hidden_size / num_attention_heads for {config['model_type']}"
        with pytest.raises(ModelError, match=f"^here/config.json: {said}$"):
            check_generates(parse_architecture(config | {"head_dim": 32}, "here"), "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5, and vLLM's is 7"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types are not window and full by turns"),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default"}}, "rope_type is not yarn"),
        ({"rope_scaling": GPT_OSS["rope_scaling"] | {"attn_factor": 0.9}}, "has an attention factor of its own"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    ],
)
def test_what_vllm_takes_for_granted_of_gpt_oss(change: dict[str, Any], said: str) -> None:
    check_generates(parse_architecture(GPT_OSS, "here"), "here")
    with pytest.raises(ModelError, match=said):
        check_generates(parse_architecture(GPT_OSS | change, "here"), "here")


def test_gpt_oss_has_as_many_parameters_as_its_makers_say() -> None:
    read = parse_architecture(GPT_OSS, "here")  # 20.9B, of which a token uses 3.6B beside its embedding
    active = active_parameters(read) - read.vocabulary * read.hidden
    assert (round(model_parameters(read) / 1e8), round(active / 1e8)) == (209, 36)


def test_rows_beyond_vllms_table_are_not_generated() -> None:
    check_generates(parse_architecture(LLAMA | {"rope_scaling": YARN}, "here"), "here")
    short = parse_architecture(LLAMA | {"rope_scaling": YARN | {"factor": 2.0}}, "here")
    with pytest.raises(ModelError, match="max_position_embeddings is 131072, and vLLM's table .*, 65536; lower it"):
        check_generates(short, "here")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
LLAMA3 = LLAMA["rope_scaling"]
assert isinstance(LLAMA3, dict)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GEMMA3, {"rope_theta": None}, "rope_theta is None; it must be a number above 0"),
    (GEMMA3, {"rope_local_base_freq": None}, "rope_local_base_freq is None; it must be a number above 0"),
    (QWEN3, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "rope_theta is None"),
    (QWEN2, {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window is 0; it must be a whole number above 0"),
    (MISTRAL, {"sliding_window": 4096.0}, "sliding_window is 4096.0; it must be a whole number"),
    (
        MISTRAL,
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 40},
        "layer_types is .*; supported: sliding",
    ),
    (QWEN2, {"use_sliding_window": 1}, "use_sliding_window is 1; it must be true or false"),
    (QWEN2, {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 27}, "layer_types has 27"),
    (QWEN2, {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 28}, "layer_types is .*chunked"),
    (QWEN2, {"layer_types": ["sliding_attention"] * 28}, "layer_types is .*; supported: full_attention in every layer"),
    (QWEN2_MOE, {"use_sliding_window": True, "sliding_window": None}, "sliding_window is None"),
    (LLAMA, {"sliding_window": 4096}, "sliding_window is 4096"),
    (MISTRAL, {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
    (MISTRAL, {"layer_types": ["sliding_attention"] * 40}, "layer_types"),
    (LLAMA, {"layer_types": ["full_attention"] * 31}, "layer_types has 31"),
    (LLAMA, {"logit_scale": 0.5}, "logit_scale is 0.5"),
    (LLAMA, {"is_causal": False}, "is_causal is False"),
    (LLAMA, {"is_causal": 1}, "is_causal is 1"),
    (LLAMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (LLAMA, {"bias": True}, "bias is True"),
    (LLAMA, {"qkv_bias": True}, "qkv_bias is True"),
    (LLAMA, {"qkv_bias": False, "attention_bias": True}, "qkv_bias is False"),
    (LLAMA, {"attention_bias": "no"}, "attention_bias is 'no'"),
    (QWEN2, {"qk_norm": True}, "qk_norm is True"),
    (QWEN3, {"use_qk_norm": False}, "use_qk_norm is False"),
    (QWEN2, {"use_mrope": True}, "use_mrope is True"),
    (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
    (LLAMA, {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    (LLAMA, {"residual_multiplier": 0.22}, "residual_multiplier"),
    (LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    (LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (LLAMA, {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    (LLAMA, {"scale_depth": 1.4}, "scale_depth"),
    (LLAMA, {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    (LLAMA, {"num_experts": 8}, "num_experts is 8"),
    (LLAMA, {"head_dtype": "float32"}, "head_dtype"),
    (LLAMA, {"per_layer_config": {"0": {"num_attention_heads": 8}}}, "per_layer_config"),
    (LLAMA, {"attention_chunk_size": 128}, "attention_chunk_size"),
    (LLAMA, {"text_config": {"hidden_size": 64}}, "text_config"),
    (LLAMA, {"compression_config": {"bits": 4}}, "compression_config"),
    (LLAMA, {"quantization_config": {}}, "quantization_config"),
    (LLAMA, {"to_dict": 1}, "to_dict is 1"),
    (LLAMA, {"to_dict": None}, "to_dict is None, and is not for a config.json to say"),
    (LLAMA, {"attribute_map": None}, "attribute_map is None"),
    (LLAMA, {"_attn_implementation": "nonsense"}, "_attn_implementation is 'nonsense'"),
    (LLAMA, {"auto_map": None}, "auto_map is null, which transformers refuses"),
    (LLAMA, {"auto_map": 0}, "auto_map is 0"),
    (MISTRAL, {"layer_types": None}, "layer_types is null, which transformers refuses"),
    (LLAMA, {"__class__": 1}, "__class__ is 1"),
    (LLAMA, {"\x1b[31mred\n": 1}, r"\\x1b\[31mred\\n is 1"),
    (LLAMA, {"unknown": ["x" * 10**6]}, "unknown is"),
    (LLAMA, {"original_max_position_embeddings": 4096}, "original_max_position_embeddings"),
    (LLAMA, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    (LLAMA, {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    (LLAMA, {"is_causal": None}, "is_causal is null"),
    (LLAMA, {"hidden_act": None}, "hidden_act is null, which transformers refuses"),
    (LLAMA, {"auto_map": {"AutoModelForCausalLM": "own.Model"}}, "auto_map"),
    (LLAMA, {"num_labels": 10**9}, "num_labels is 1000000000; it must be 1 to"),
    (LLAMA, {"id2label": {"a": "b"}}, "id2label is"),
    (LLAMA, {"num_labels": 1, "problem_type": "single_label_classification"}, "problem_type is"),
    (LLAMA, {"auto_map": 5}, "auto_map"),
    (LLAMA, {"architectures": ["LlamaForRewardModel"]}, "architectures is"),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures is"),
    (LLAMA, {"architectures": ["Qwen2ForCausalLM"]}, "architectures is"),
    (LLAMA, {"model_type": ["llama"]}, "model_type is"),
    (LLAMA, {"model_type": None}, "model_type is None"),
    (LLAMA, {"torch_dtype": "bf16"}, "torch_dtype is 'bf16'"),
    (LLAMA, {"torch_dtype": ["bfloat16"]}, "torch_dtype is"),
    (LLAMA, {"use_cache": 1}, "use_cache is 1; it must be true or false"),
    (LLAMA, {"initializer_range": "0.02"}, "initializer_range is '0.02'"),
    (LLAMA, {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    (LLAMA, {"num_attention_heads": 32, "num_key_value_heads": 5}, "no multiple of num_key_value_heads, 5"),
    (LLAMA, {"num_key_value_heads": 64}, "no multiple of num_key_value_heads, 64"),
    (LLAMA, {"head_dim": 127}, "head_dim is 127; it must be even"),
    (LLAMA, {"hidden_size": 4100}, "no multiple of num_attention_heads"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000; it must be at most 10,000"),
    (LLAMA, {"hidden_size": 10**30}, "hidden_size is 1.000e[+]30; it must be at most"),
    (LLAMA, {"vocab_size": 10**400}, "vocab_size is beyond 1e300; it must be at most"),
    (LLAMA, {"max_position_embeddings": 10**9}, "max_position_embeddings is"),
    (LLAMA, {"intermediate_size": -1}, "intermediate_size is -1"),
    (LLAMA, {"intermediate_size": True}, "intermediate_size is True"),
    (LLAMA, {"hidden_size": 4096.0}, "hidden_size is 4096.0"),
    (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    (LLAMA, {"rms_norm_eps": 5.0}, "rms_norm_eps is 5.0; it must be at most 0.1"),
    (LLAMA, {"rope_theta": 1e300}, "rope_theta is 1e[+]300; it must be at most"),
    (LLAMA, {"rope_theta": [1]}, r"rope_theta is \[1\]"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.rope_type is 'dynamic'"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling.factor is 4, .* a number with a point"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 4.0, "beta_fast": 1}}, "rope_scaling.beta_fast is 1"),
    (LLAMA, {"rope_scaling": YARN | {"finetuned": True}}, "rope_scaling.finetuned is True"),
    (LLAMA, {"rope_scaling": YARN | {"low_freq_factor": 1.0}}, "rope_scaling.low_freq_factor is 1.0"),
    (LLAMA, {"rope_scaling": YARN | {"attn_factor": 0}}, "attn_factor is 0; it must be a number above 0"),
    (
        LLAMA,
        {"rope_scaling": YARN | {"attn_factor": 0.8782488562869419, "attention_factor": 0.8782488562869419}},
        "rope_scaling.attn_factor scales queries and keys by 1, and attention_factor by 0.878249; remove one",
    ),
    (
        LLAMA,
        {"rope_scaling": YARN | {"attn_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "rope_scaling.attn_factor scales queries and keys by 1.13863, and the mscales by 1; remove one",
    ),
    (DEEPSEEK_V3, {"rope_scaling": YARN | {"attn_factor": 0.9}}, "vLLM has no .*attn_factor .* with latent attention"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"attn_factor": 0.9}}, "rope_scaling.attn_factor is 0.9"),
    (LLAMA, {"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate is 1"),
    (LLAMA, {"rope_scaling": YARN | {"truncate": None}}, "rope_scaling.truncate is None"),
    (LLAMA, {"rope_scaling": YARN | {"beta_fast": 0}}, "beta_fast is 0"),
    (LLAMA, {"rope_scaling": YARN | {"original_max_position_embeddings": 1.5}}, "original_max_position_embeddings is"),
    (LLAMA, {"rope_scaling": YARN, "rope_theta": 1}, "rope_theta is 1.0"),
    (LLAMA, {"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "rope_scaling.partial_rotary_factor is 0.5"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "rope_scaling.high_freq_factor is 1.0"),
    (LLAMA, {"rope_scaling": LONG | {"long_factor": [1.0]}}, "rope_scaling.long_factor has 1 numbers, and 64 pairs"),
    (LLAMA, {"rope_scaling": LONG | {"short_factor": ["a"] * 64}}, "short_factor is 'a'; it must be a number"),
    (LLAMA, {"rope_scaling": LONG | {"short_mscale": 1.2}}, "rope_scaling.short_mscale is 1.2"),
    (LLAMA, {"rope_scaling": LONG | {"is_long": True}}, "rope_scaling.is_long is True"),
    (SMOLLM3, {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 layers, and num_hidden_layers is 36"),
    (SMOLLM3, {"no_rope_layers": [2] * 36}, "no_rope_layers is .*; it must be a list of 0 and 1"),
    (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window is True"),
    (LLAMA, {"rope_scaling": {"type": ["linear"]}}, "rope_scaling.rope_type is"),
    (
        LLAMA,
        {"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [1]}},
        "rope_type is 'default' and type",
    ),
    (LLAMA, {"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "rope_scaling.factor is 4.0"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "rope_scaling.attention_factor"),
    (LLAMA, {"rope_scaling": without(LLAMA3, "low_freq_factor")}, "rope_scaling.low_freq_factor is missing"),
    (LLAMA, {"rope_scaling": LLAMA3 | {"factor": 1e9}}, "factor is"),
    (LLAMA, {"rope_scaling": False}, "rope_scaling must be an object"),
    (LLAMA, {"rope_scaling": None, "rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention"),
    (LLAMA, {"eos_token_id": 128256}, "eos_token_id has 128256; it must be a token id"),
    (LLAMA, {"eos_token_id": [1, "2"]}, "eos_token_id has '2'"),
    (LLAMA, {"eos_token_id": True}, "eos_token_id has True"),
    (LLAMA, {"bos_token_id": -1}, "bos_token_id has -1"),
    (LLAMA, {"bos_token_id": [1]}, r"bos_token_id has \[1\]"),
    (LLAMA, {"pad_token_id": 2.0}, "pad_token_id has 2.0"),
    (QWEN3_CODER, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, of 128 experts"),
    (QWEN3_CODER, {"num_local_experts": 64}, "num_experts and num_local_experts differ"),
    (QWEN3_CODER, {"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
    (QWEN3_CODER, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512"),
    (QWEN3_CODER, {"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]"),
    (QWEN3_CODER, {"n_group": 8}, "n_group is 8"),
    (QWEN3_CODER, {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
    (QWEN2_MOE, {"mlp_only_layers": [24]}, r"mlp_only_layers is \[24\]; it must be a list of layers, 0 to 23"),
    (QWEN2_MOE, {"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\]"),
    (QWEN2_MOE, {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
    (QWEN2_MOE, {"mlp_only_layers": list(range(24))}, "mlp_only_layers is .*, which is not supported"),
    (QWEN2_MOE, {"decoder_sparse_step": 25}, "decoder_sparse_step is 25, which is not supported"),
    (QWEN2_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a whole number above 0"),
    (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    (without(QWEN2_MOE, "shared_expert_intermediate_size"), {}, "shared_expert_intermediate_size is missing"),
    (without(QWEN2_MOE, "num_key_value_heads"), {"num_attention_heads": 32}, "num_key_value_heads is missing; add it"),
    (QWEN2_MOE, {"qkv_bias": False}, "qkv_bias is False"),
    (QWEN2_MOE, {"n_shared_experts": 1}, "n_shared_experts is 1"),
    (QWEN2_MOE, {"architectures": ["Qwen3MoeForCausalLM"]}, "architectures is"),
    (GEMMA, {"hidden_act": "silu"}, "hidden_act is 'silu', .*; supported: gelu or gelu_pytorch_tanh"),
    (GEMMA2, {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    (GEMMA2, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    (GEMMA2, {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0; it must be a number above 0"),
    (GEMMA2, {"query_pre_attn_scalar": 256.0}, "query_pre_attn_scalar is 256.0; it must be a whole number"),
    (GEMMA2, {"sliding_window": None}, "sliding_window is None, which is not supported; supported: a number"),
    (GEMMA2, {"sliding_window_pattern": 6}, "sliding_window_pattern is 6"),
    (GEMMA2, {"rope_local_base_freq": 10000.0}, "rope_local_base_freq"),
    (GEMMA2, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    (without(GEMMA2, "head_dim"), {}, "head_dim is missing; add it"),
    (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    (GEMMA3, {"sliding_window_pattern": None}, "sliding_window_pattern is null"),
    (GEMMA3, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters is .*; supported: an object of full_att"),
    (GEMMA3, {"rope_parameters": {"full_attention": 5}}, "rope_parameters is "),
    (GEMMA3, {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_type is 'default' and type is 'linear'"),
    (GEMMA3, {"rope_scaling": 5}, "rope_scaling"),
    (GEMMA3, {"rope_local_base_freq": -1}, "rope_local_base_freq is -1"),
    (GEMMA3, {"vision_config": {}}, "vision_config"),
    (GRANITE, {"residual_multiplier": 0.0}, "residual_multiplier is 0.0; it must be a number above 0"),
    (GRANITE, {"embedding_multiplier": None}, "embedding_multiplier is null, which transformers refuses"),
    (GRANITE, {"logits_scaling": "16"}, "logits_scaling is '16'"),
    (GRANITE, {"layer_types": ["sliding_attention"] * 40}, "layer_types"),
    (GRANITE, {"sliding_window": 4096}, "sliding_window is 4096"),
    (GRANITE, {"mlp_bias": True}, "mlp_bias is True"),
    (COHERE2, {"use_qk_norm": True}, "use_qk_norm is True"),
    (COHERE, {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, .*; supported: layer_norm_eps, of LayerNorm"),
    (COHERE, {"logit_scale": None}, "logit_scale is null, which transformers refuses"),
    (COHERE, {"layer_norm_eps": 0}, "layer_norm_eps is 0"),
    (COHERE, {"sliding_window": 4096}, "sliding_window"),
    (COHERE2, {"use_parallel_block": False}, "use_parallel_block is False"),
    (COHERE2, {"position_embedding_type": "rope"}, "position_embedding_type is 'rope'"),
    (COHERE2, {"rotary_pct": 0.5}, "rotary_pct is 0.5"),
    (COHERE2, {"layer_types": ["sliding_attention"]}, "layer_types has 1 layers"),
    (GPT_OSS, {"attention_bias": False}, "attention_bias is False"),
    (GPT_OSS, {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
    (GPT_OSS, {"swiglu_limit": None}, "swiglu_limit is null"),
    (GPT_OSS, {"num_experts_per_tok": 33}, "num_experts_per_tok is 33, of 32 experts"),
    (GPT_OSS, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is .*; supported: that of MXFP4"),
    (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4", "bits": 3}}, "quantization_config.bits is 3"),
    (GPT_OSS, {"norm_topk_prob": False}, "norm_topk_prob"),
    (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, of 8 experts"),
    (MIXTRAL, {"num_local_experts": 0}, "num_local_experts is 0; it must be a whole number above 0"),
    (MIXTRAL, {"num_experts": 8}, "num_experts is 8, which this version does not know"),
    (MIXTRAL, {"moe_intermediate_size": 512}, "moe_intermediate_size is 512"),
    (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    (MIXTRAL, {"layer_types": ["sliding_attention"] * 32}, "layer_types is"),
    (without(MIXTRAL, "num_key_value_heads"), {}, "num_key_value_heads is missing; add it"),
    (without(QWEN3, "head_dim"), {}, "head_dim is missing; add it"),
    (without(QWEN2, "num_key_value_heads"), {}, "num_key_value_heads is missing; add it"),
    (without(LLAMA, "vocab_size"), {}, "vocab_size is missing"),
]


@pytest.mark.parametrize(("config", "change", "told"), REFUSED, ids=[told[:40] for _, _, told in REFUSED])
def test_what_would_be_another_model_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ModelError, match=f"^here/config.json: .*{told}") as caught:
        parse_architecture(config | change, "here")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"5", b"null", b"\xff\xfe", b"[" * 10**5, b'{"a": NaN}', b'{"a": 1e999}', b"9" * 10**5],
)
def test_a_config_that_is_no_config_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_architecture(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ") and str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["nowhere", "a\0b", "a" * 5000, "a\nb", "/dev/zero"])
def test_what_cannot_be_a_models_path_is_one_line(path: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / "tiny_sft.yaml")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path, "config": None})})
    with pytest.raises(ModelError, match="no such file") as caught:
        read_architecture(path)
    with pytest.raises(RecipeError, match="there is no") as planned:
        plan_text(recipe, 1)
    for error in (caught, planned):
        assert str(error.value).isprintable() and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (without(LLAMA, "architectures"), '"architectures" is missing'),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "a classifier generates nothing"),
        (QWEN2 | {"head_dim": 64}, "vLLM takes hidden_size / num_attention_heads"),
    ],
)
def test_a_plan_refuses_what_vllm_would_not_generate_with(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((RolloutError, ModelError), match=told):
        plan_text(load_recipe(ROOT / "recipes" / "smollm_grpo.yaml", [f"model.path={tmp_path}"]), 1)
    assert plan_text(load_recipe(ROOT / "recipes" / "tiny_sft.yaml", [f"model.path={tmp_path}"]), 2)


@pytest.mark.parametrize("content", ["[]", "{", '{"vocab_size": NaN}', '{"model_type": "llama"}'])
def test_a_plan_refuses_in_the_words_of_a_run(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError) as run:
        read_architecture(tmp_path)
    with pytest.raises(ModelError) as planned:
        plan_text(load_recipe(ROOT / "recipes" / "tiny_sft.yaml", [f"model.path={tmp_path}"]), 2)
    assert str(planned.value) == str(run.value)


@pytest.mark.parametrize("loop", ["smollm_grpo", "tiny_sft"])
def test_a_plan_refuses_what_a_run_would(tmp_path: Path, loop: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"logit_scale": 0.5}))
    recipe = load_recipe(ROOT / "recipes" / f"{loop}.yaml", [f"model.path={tmp_path}"])
    with pytest.raises(ModelError, match="logit_scale is 0.5, which is not supported; supported: 1.0"):
        plan_text(recipe, 1)
