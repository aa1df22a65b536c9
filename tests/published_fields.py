"""config.json of published models by the fields that their makers give, with variations; numbers may differ."""

from __future__ import annotations

from typing import Any

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
    "Command A": without(
        COHERE2,
        "layer_switch",
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
        "use_parallel_embedding",
    )
    | {"hidden_size": 12288, "intermediate_size": 36864, "num_attention_heads": 96, "num_hidden_layers": 64},
    "DeepSeek-V3, transformers 5": without(DEEPSEEK_V3, "auto_map", "rope_scaling", "rope_theta", "torch_dtype")
    | {"dtype": "bfloat16", "head_dim": 64, "rope_interleave": True}
    | {"rope_parameters": DEEPSEEK_V3["rope_scaling"] | {"rope_theta": 10000.0, "rope_type": "yarn"}},  # type: ignore[operator]
    "Ministral 8B": MISTRAL
    | {"hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 32768, "num_hidden_layers": 36}
    | {"rope_theta": 100000000.0, "sliding_window": 32768},
    "Qwen3-Next with YaRN": QWEN3_NEXT
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}},
    "QwQ 32B": QWEN2
    | {"hidden_size": 5120, "max_window_layers": 64, "num_attention_heads": 40, "num_hidden_layers": 64}
    | {"num_key_value_heads": 8, "rope_theta": 1000000.0, "sliding_window": 32768},
    "SmolLM3 with YaRN": SMOLLM3
    | {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}},
}
