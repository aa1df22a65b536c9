"""config.json of published models, as their makers wrote them, and small models of the same flags.

``published_configs.json`` has them field for field, one model in a line.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import published_dense
import published_fields

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())

# By their makers' fields.
A13B = PUBLISHED["Hunyuan-7B-Instruct"] | {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "group_limited_greedy": False, "intermediate_size": 3072,
    "kv_lora_rank": None, "model_type": "hunyuan_v1_moe", "moe_drop_tokens": False,
    "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_random_routing_dropped_token": False,
    "moe_topk": [8] * 32, "n_group": False, "norm_topk_prob": True, "num_experts": 64, "num_shared_expert": [1] * 32,
    "q_lora_rank": None, "routed_scaling_factor": False, "topk_group": False, "use_mixed_mlp_moe": True,
}  # fmt: skip
ERNIE_21B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1,
    "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2, "num_attention_heads": 20,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "num_nextn_predict_layers": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_bias": False,
    "vocab_size": 103424,
}  # fmt: skip
MISTRAL4 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "kv_lora_rank": 256, "max_position_embeddings": 1048576, "model_type": "mistral4",
    "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 36,
    "num_key_value_heads": 32, "output_router_logits": False, "pad_token_id": 11, "pretraining_tp": 1,
    "q_lora_rank": 1024, "qk_head_dim": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1,
        "max_position_embeddings": 1048576, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        "rope_type": "yarn", "type": "yarn",
    },
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "v_head_dim": 128,
    "vocab_size": 131072,
}  # fmt: skip
SMALL4 = {
    "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
    "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
    "spatial_merge_size": 2, "text_config": MISTRAL4, "tie_word_embeddings": False, "transformers_version": "5.3.0",
    "vision_config": {
        "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
        "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
        "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "vision_feature_layer": -1,
}  # fmt: skip
K2 = PUBLISHED["Kimi-K2-Instruct"]
OF_K25 = "modeling_kimi_k25.KimiK25ForConditionalGeneration"
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {
        "AutoConfig": "configuration_kimi_k25.KimiK25Config", "AutoModel": OF_K25, "AutoModelForCausalLM": OF_K25,
    },
    "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163585, "ignore_index": -100,
    "media_placeholder_token_id": 163605, "model_type": "kimi_k25", "pad_token_id": 163839,
    "text_config": {field: value for field, value in K2.items() if field != "quantization_config"}
    | {"max_position_embeddings": 262144, "rope_scaling": K2["rope_scaling"] | {"factor": 64.0}, "topk_group": 1},
    "tie_word_embeddings": False, "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "merge_kernel_size": [2, 2], "num_attention_heads": 16,
        "num_hidden_layers": 27, "patch_size": 14, "pos_emb_height": 64, "pos_emb_time": 4, "pos_emb_width": 64,
    },
}  # fmt: skip
_WINDOWS_AND_FULL = [*["sliding_attention"] * 5, "full_attention"]
_GEMMA4_TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": True, "bos_token_id": 2,
    "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "expert_intermediate_size": None,
    "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02, "intermediate_size": 21504, "layer_types": _WINDOWS_AND_FULL * 10,
    "max_position_embeddings": 262144, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_attention_heads": 32, "num_experts": None, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
    "num_key_value_heads": 16, "num_kv_shared_layers": 0, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024, "tie_word_embeddings": True, "top_k_experts": None,
    "use_bidirectional_attention": "vision", "use_cache": True, "use_double_wide_mlp": False, "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}  # fmt: skip
_GEMMA4_26B_TEXT = _GEMMA4_TEXT | {
    "enable_moe_block": True, "hidden_size": 2816, "intermediate_size": 2112, "layer_types": _WINDOWS_AND_FULL * 5,
    "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2,
    "num_hidden_layers": 30, "num_key_value_heads": 8, "top_k_experts": 8,
}  # fmt: skip
_GEMMA4_E2B_TEXT = _GEMMA4_TEXT | {
    "attention_k_eq_v": False, "hidden_size": 1536, "hidden_size_per_layer_input": 256, "intermediate_size": 6144,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "max_position_embeddings": 131072,
    "num_attention_heads": 8, "num_global_key_value_heads": None, "num_hidden_layers": 35, "num_key_value_heads": 1,
    "num_kv_shared_layers": 20, "sliding_window": 512, "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
}  # fmt: skip
GEMMA4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "audio_token_id": 258881,
    "boa_token_id": 256000, "boi_token_id": 255999, "dtype": "bfloat16", "eoa_token_id": 258883,
    "eoa_token_index": 258883, "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880,
    "initializer_range": 0.02, "model_type": "gemma4", "text_config": _GEMMA4_TEXT, "tie_word_embeddings": True,
    "transformers_version": "5.5.0.dev0", "video_token_id": 258884,
    "vision_config": {
        "attention_bias": False, "attention_dropout": 0.0, "default_output_length": 280, "dtype": "bfloat16",
        "global_head_dim": 72, "head_dim": 72, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 4304, "max_position_embeddings": 131072, "model_type": "gemma4_vision",
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16, "patch_size": 16,
        "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}, "standardize": True,
        "use_clipped_linears": False,
    },
    "vision_soft_tokens_per_image": 280,
}  # fmt: skip
GEMMA4_26B = GEMMA4_31B | {"text_config": _GEMMA4_26B_TEXT}
GEMMA4_E2B = GEMMA4_31B | {
    "audio_config": {"hidden_size": 1024, "model_type": "gemma4_audio", "num_hidden_layers": 12},
    "text_config": _GEMMA4_E2B_TEXT,
}
# A classifier has no logprobs.
_FIELDS = {name: config for name, config in published_fields.PUBLISHED.items() if name != "a reward model"}
PUBLISHED = _FIELDS | PUBLISHED | {"Hunyuan-A13B-Instruct": A13B, "ERNIE-4.5-21B-A3B": ERNIE_21B}
PUBLISHED |= {"Mistral-Small-4-119B": SMALL4, "Mistral-Small-4-119B, its language model": MISTRAL4}
PUBLISHED["Kimi-K2.5, not quantised"] = KIMI_K25
PUBLISHED |= {"gemma-4-31B-it": GEMMA4_31B, "gemma-4-26B-A4B-it": GEMMA4_26B, "gemma-4-E2B-it": GEMMA4_E2B}

# But for those whose factors of LongRoPE are not the published ones, and for what the file has.
_ELSEWHERE = ("EXAONE 4.0 32B", "Phi-3.5 mini", "Phi-4", "Phi-4 mini")
PUBLISHED |= {name: config for name, config in published_dense.PUBLISHED.items() if name not in _ELSEWHERE}

# What a folder of the language model alone has, as transformers saves it.
PUBLISHED |= {
    f"{name}, its language model": config["text_config"]
    for name, config in PUBLISHED.items()
    if config["model_type"].startswith("qwen3_5") or name in ("gemma-4-31B-it", "gemma-4-26B-A4B-it")
}

LAYERS, HEADS, HEAD, EXPERTS, CHOSEN, VOCABULARY, WINDOW = 6, 4, 32, 16, 3, 250, 4
# Widths and counts; every other field stays.
_SIZES = {
    "hidden_size": HEADS * HEAD, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": LAYERS,
    "shared_intermediate_size": 96, "mamba_n_heads": HEADS, "mamba_d_head": 2 * HEAD,
    "num_attention_heads": HEADS, "vocab_size": VOCABULARY, "n_routed_experts": EXPERTS, "num_experts": EXPERTS,
    "num_local_experts": EXPERTS, "moe_num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_k": CHOSEN,
    "experts_per_token": CHOSEN, "moe_topk": CHOSEN, "shared_expert_intermediate_size": 48, "head_dim": HEAD,
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_head_dim": HEAD,
    "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "rotary_dim": HEAD // 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "global_head_dim": 2 * HEAD, "num_global_key_value_heads": 1,
    "top_k_experts": CHOSEN,
}  # fmt: skip
_TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}
_VISION_SIZES = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_heads": 2,
    "num_hidden_layers": 1, "num_key_value_heads": 2, "num_position_embeddings": 16, "out_hidden_size": HEADS * HEAD,
}  # fmt: skip


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with fewer and narrower layers, and with the flags, patterns and positions of ``config``."""
    if "vision_config" in config:
        tower = {field: _VISION_SIZES.get(field, value) for field, value in config["vision_config"].items()}
        outer = {f: value for f, value in config.items() if f not in ("quantization_config", "text_config")}
        del outer["vision_config"]
        tokens = {field: _SIZES[field] for field in outer.keys() & _TOKENS}
        outer = small(outer) if "hidden_size" in outer else outer | tokens
        inner = {"text_config": small(config["text_config"])} if "text_config" in config else {}
        return outer | inner | {"vision_config": tower}
    shrunk = {field: _SIZES.get(field, value) if value else value for field, value in config.items()}
    shrunk.pop("quantization_config", None)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if groups is not None:
        shrunk["num_key_value_heads"] = HEADS if groups == heads else min(groups, 2)
    if config.get("kv_lora_rank") and config.get("head_dim") == config["qk_rope_head_dim"]:  # what is turned of a head
        shrunk["head_dim"] = shrunk["qk_rope_head_dim"]
    if "linear_num_value_heads" in config:
        ratio = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        shrunk["linear_num_value_heads"] = 2 * ratio
    if shrunk.get("sliding_window") and config["sliding_window"] < config.get("max_position_embeddings", math.inf):
        shrunk["sliding_window"] = WINDOW
    for field, value in config.items():
        if isinstance(value, list) and len(value) == config["num_hidden_layers"]:
            wide = value[0] == config.get("intermediate_size")
            narrow = _SIZES["intermediate_size"] if wide else _SIZES.get(field)
            shrunk[field] = [narrow or each for each in value[:LAYERS]]
    for field in ("rope_scaling", "rope_parameters"):
        if shrunk.get(field):
            shrunk[field] = _small_rope(shrunk, shrunk[field])
    return shrunk


def _small_rope(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Return the positions of a head of the small model's size."""
    turned = int(HEAD * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)) // 2
    of_pairs = {"short_factor", "long_factor"}
    shrunk = {field: value[:turned] if field in of_pairs else value for field, value in rope.items()}
    if "qk_rope_head_dim" in config and "partial_rotary_factor" in rope:
        shrunk["partial_rotary_factor"] = config["qk_rope_head_dim"] / HEAD
    if "mrope_section" in rope:
        shrunk["mrope_section"] = [turned - 2 * (turned // 3), turned // 3, turned // 3]
    return shrunk
