"""Configs of published models are read, and a config that would be another model is refused by the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import published_dense
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

ROOT = Path(__file__).parents[2]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0", "use_cache": True, "vocab_size": 128256,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 1024000, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 131072,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
    "model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "rope_scaling": None,
    "sliding_window": None, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_CODER = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128,
    "num_experts_per_tok": 8, "output_router_logits": False, "qkv_bias": False, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 0, "use_qk_norm": True,
}  # fmt: skip


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {field: value for field, value in config.items() if field not in fields}


QWEN2_MOE = QWEN2 | {
    "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
    "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 16, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "vocab_size": 151936,
}  # fmt: skip
SMOLLM3 = {
    "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None,
    "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
    "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": False, "use_sliding_window": False,
    "vocab_size": 128256,
}  # fmt: skip
MIXTRAL = without(MISTRAL, "head_dim") | {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "max_position_embeddings": 32768,
    "model_type": "mixtral", "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_local_experts": 8,
    "output_router_logits": False, "router_aux_loss_coef": 0.02, "vocab_size": 32000,
}  # fmt: skip
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
}  # fmt: skip
OF_GEMMA2 = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window")
GEMMA = without(GEMMA2, *OF_GEMMA2) | {
    "architectures": ["GemmaForCausalLM"], "eos_token_id": 1, "hidden_act": "gelu", "hidden_activation": None,
    "hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma", "num_hidden_layers": 18,
    "num_key_value_heads": 1,
}  # fmt: skip
GRANITE = without(LLAMA, "rope_scaling") | {
    "architectures": ["GraniteForCausalLM"], "attention_dropout": 0.1, "attention_multiplier": 0.0078125,
    "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "intermediate_size": 12800,
    "logits_scaling": 16.0, "max_position_embeddings": 4096, "model_type": "granite", "num_hidden_layers": 40,
    "pad_token_id": 0, "residual_multiplier": 0.22, "rope_scaling": None, "rope_theta": 10000,
    "tie_word_embeddings": True, "vocab_size": 49155,
}  # fmt: skip
GEMMA3 = without(GEMMA2, "hidden_act") | {
    "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None, "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip
GLM = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
    "use_cache": True, "use_qk_norm": True, "vocab_size": 151552,
}  # fmt: skip
GLM_FLASH = without(GLM, "head_dim", "use_qk_norm") | {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
    "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "n_routed_experts": 64, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.8, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
GLM_AIR = GLM | {
    "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "num_hidden_layers": 46, "routed_scaling_factor": 1.0, "use_qk_norm": False,
}  # fmt: skip
COHERE = without(LLAMA, "rms_norm_eps", "rope_scaling", "mlp_bias", "tie_word_embeddings") | {
    "architectures": ["CohereForCausalLM"], "bos_token_id": 5, "eos_token_id": 255001, "hidden_size": 8192,
    "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
    "model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40,
    "num_key_value_heads": 64, "pad_token_id": 0, "rope_theta": 8000000.0, "use_qk_norm": False, "vocab_size": 256000,
}  # fmt: skip
COHERE2 = without(COHERE, "model_max_length", "use_qk_norm") | {
    "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 14336, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 132096,
    "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rope_scaling": None,
    "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": True,
}  # fmt: skip
OF_DEEPSEEK = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": OF_DEEPSEEK, "aux_loss_alpha": 0.001, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
BLOCKS = {"weight_block_size": [128, 128]}
MOONLIGHT = without(DEEPSEEK_V3, "rope_scaling", "num_nextn_predict_layers") | {
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_theta": 50000.0, "routed_scaling_factor": 2.446,
    "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
DEEPSEEK_V2 = without(DEEPSEEK_V3, "num_nextn_predict_layers") | {
    "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 5120,
    "intermediate_size": 12288, "model_type": "deepseek_v2", "moe_intermediate_size": 1536, "n_routed_experts": 160,
    "n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6, "num_hidden_layers": 60,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},  # type: ignore[operator]
    "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
GPT_OSS = without(LLAMA, "mlp_bias", "torch_dtype", "pretraining_tp", "bos_token_id") | {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "eos_token_id": 200002, "experts_per_token": 4,
    "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "vocab_size": 201088,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True,
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED = {
    "Qwen3-Next": QWEN3_NEXT,
    "Qwen3-Next, all defaults": without(
        QWEN3_NEXT, "full_attention_interval", "linear_key_head_dim", "norm_topk_prob", "partial_rotary_factor"
    ),
    "gpt-oss-20b": GPT_OSS,
    "gpt-oss, all defaults": without(
        GPT_OSS,
        "rope_scaling",
        "rope_theta",
        "num_local_experts",
        "num_experts_per_tok",
        "attention_bias",
        "layer_types",
        "sliding_window",
        "swiglu_limit",
        "rms_norm_eps",
    ),
    "Command R": COHERE,
    "Command R+": COHERE
    | {"hidden_size": 12288, "intermediate_size": 33792, "num_attention_heads": 96, "num_hidden_layers": 64}
    | {"num_key_value_heads": 8, "rope_theta": 75000000.0, "use_qk_norm": True},
    "Command R, all defaults": without(COHERE, "layer_norm_eps", "logit_scale", "rope_theta"),
    "Command R7B": COHERE2,
    "Command R7B, all defaults": without(COHERE2, "sliding_window", "sliding_window_pattern", "head_dim"),
    "DeepSeek-V2": DEEPSEEK_V2,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3
    | {"quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"} | BLOCKS},
    "Moonlight": MOONLIGHT,
    "GLM-4.7-Flash": GLM_FLASH,
    "Gemma 2B": GEMMA,
    "Granite 3.0 8B": GRANITE,
    "Granite, all defaults": without(
        GRANITE, "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    ),
    "Gemma 2 2B": GEMMA2,
    "Gemma 2 27B": GEMMA2
    | {"head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32}
    | {"num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "tie_word_embeddings": True},
    "Gemma 3 1B": GEMMA3,
    "Gemma 3 4B, its language model": GEMMA3
    | {"hidden_size": 2560, "intermediate_size": 10240, "max_position_embeddings": 131072, "num_attention_heads": 8}
    | {"num_hidden_layers": 34, "num_key_value_heads": 4, "sliding_window": 1024, "vocab_size": 262208}
    | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Gemma 3 270M, transformers 5": without(GEMMA3, "rope_local_base_freq", "rope_scaling", "rope_theta")
    | {"head_dim": 256, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18}
    | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "use_bidirectional_attention": False}
    | {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
        }
    },
    "GLM-4.5": GLM,
    "GLM-4.5-Air": GLM_AIR,
    "GLM-4.6 and 4.7": GLM | {"max_position_embeddings": 202752},
    "Llama 2": without(LLAMA, "rope_theta", "mlp_bias", "attention_bias", "attention_dropout", "rope_scaling")
    | {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rope_scaling": None}
    | {"_name_or_path": "meta-llama/Llama-2-7b-hf", "torch_dtype": "float16", "max_length": 4096},
    "Llama 3.1": LLAMA,
    "Llama 3.2 3B": LLAMA
    | {"head_dim": 128, "hidden_size": 3072, "num_attention_heads": 24, "tie_word_embeddings": True}
    | {"rope_scaling": LLAMA["rope_scaling"] | {"factor": 32.0}},  # type: ignore[operator]
    "R1-Distill-Llama": LLAMA | {"eos_token_id": 128001},
    "unsloth's": LLAMA | {"unsloth_version": "2025.1", "unsloth_fixed": True, "pad_token_id": 128004},
    "SmolLM2": without(LLAMA, "rope_scaling")
    | {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    "CodeLlama": without(LLAMA, "rope_scaling") | {"rope_theta": 1000000, "eos_token_id": 2, "bos_token_id": 1},
    "Mistral Nemo": MISTRAL,
    "Mistral 7B v0.1": without(MISTRAL, "head_dim")
    | {"hidden_size": 4096, "max_position_embeddings": 32768, "num_hidden_layers": 32, "rope_theta": 10000.0}
    | {"sliding_window": 4096, "vocab_size": 32000},
    "Mixtral 8x7B": MIXTRAL,
    "Mixtral, all defaults": without(MIXTRAL, "rms_norm_eps", "rope_theta", "num_local_experts", "num_experts_per_tok"),
    "Qwen2.5": QWEN2,
    "Qwen2": QWEN2 | {"sliding_window": 131072, "eos_token_id": [151645, 151643], "rope_theta": 1000000.0},
    "Qwen3": QWEN3,
    "Qwen2.5 with YaRN": QWEN2
    | {"rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    "Qwen3 with YaRN": QWEN3
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "biases of attention": QWEN3 | {"attention_bias": True},
    "deepseek-coder": without(LLAMA, "rope_scaling") | {"rope_scaling": {"factor": 4.0, "type": "linear"}},
    "SmolLM3": SMOLLM3,
    "SmolLM3 by its interval": without(SMOLLM3, "no_rope_layers", "layer_types"),
    "Qwen3-Coder-30B-A3B": QWEN3_CODER,
    "Qwen1.5-MoE-A2.7B": QWEN2_MOE,
    "Qwen2-57B-A14B": QWEN2_MOE
    | {"hidden_size": 3584, "intermediate_size": 18944, "moe_intermediate_size": 2560, "num_attention_heads": 28}
    | {"num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28, "num_key_value_heads": 4}
    | {"rope_theta": 1000000.0, "shared_expert_intermediate_size": 20480},
    "a reward model": QWEN3
    | {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    "transformers 5": without(QWEN3, "rope_theta", "torch_dtype")
    | {"dtype": "bfloat16", "layer_types": ["full_attention"] * 28, "pad_token_id": None}
    | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    "all defaults written out": QWEN2
    | {"return_dict": True, "output_attentions": False, "chunk_size_feed_forward": 0, "is_encoder_decoder": False}
    | {"pruned_heads": {}, "temperature": 1.0, "bad_words_ids": None, "top_k": 50, "task_specific_params": None},
    **published_dense.PUBLISHED,
}


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
    if read.family == "cohere2" or name == "EXAONE 4.0 32B":
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
    }.items():
        with pytest.raises(ModelError, match=changed):
            parse_architecture(expected, "here")


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
    if not read.mixed_layers or read.family in ("gemma2", "gemma3_text", "gpt_oss"):
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
    (GEMMA3, {"rope_local_base_freq": -1}, "rope_theta is -1"),
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
