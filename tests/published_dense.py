"""config.json of published models, most with dense layers, field for field.

Those of AFM, Apertus, dots.llm1, Granite, K-EXAONE, Solar and Youtu-LLM are of the makers' fields, not read off
their files: numbers may differ.
"""

from __future__ import annotations

from typing import Any

OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.47.0",
    "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
OLMO3 = OLMO2 | {
    "architectures": ["Olmo3ForCausalLM"], "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536, "model_type": "olmo3", "sliding_window": 4096,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "transformers_version": "4.57.0", "use_cache": False, "vocab_size": 100278,
}  # fmt: skip
GLM4 = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": True, "vocab_size": 151552,
}  # fmt: skip
PHI3 = {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True, "vocab_size": 32064,
}  # fmt: skip
PHI35 = PHI3 | {
    "max_position_embeddings": 131072, "sliding_window": 262144,
    "rope_scaling": {"long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
}  # fmt: skip
PHI4_MINI = PHI35 | {
    "bos_token_id": 199999, "eos_token_id": 199999, "full_attn_mod": 1, "interpolate_factor": 1,
    "lm_head_bias": False, "mlp_bias": False, "num_attention_heads": 24, "num_key_value_heads": 8,
    "pad_token_id": 199999, "partial_rotary_factor": 0.75, "tie_word_embeddings": True, "vocab_size": 200064,
}  # fmt: skip
PHI4 = {key: value for key, value in PHI3.items() if key not in ("_name_or_path", "auto_map")} | {
    "bos_token_id": 100257, "eos_token_id": 100265, "hidden_size": 5120, "intermediate_size": 17920,
    "max_position_embeddings": 16384, "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
    "original_max_position_embeddings": 16384, "pad_token_id": 100349, "rope_theta": 250000, "sliding_window": None,
    "transformers_version": "4.47.0", "vocab_size": 100352,
}  # fmt: skip
ERNIE = {
    "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 131072,
    "model_type": "ernie4_5", "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": False,
    "vocab_size": 103424,
}  # fmt: skip
EXAONE4 = {
    "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27392,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16, "max_position_embeddings": 131072,
    "model_type": "exaone4", "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
    "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": True, "vocab_size": 102400,
}  # fmt: skip
SEED_OSS = {
    "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
    "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648, "max_position_embeddings": 524288,
    "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
    "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True, "vocab_size": 155136,
}  # fmt: skip

AFM = {
    "architectures": ["ArceeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": [128001, 128003], "head_dim": 128, "hidden_act": "relu2", "hidden_size": 2560,
    "initializer_range": 0.02, "intermediate_size": 18432, "max_position_embeddings": 65536, "mlp_bias": False,
    "model_type": "arcee", "num_attention_heads": 20, "num_hidden_layers": 36, "num_key_value_heads": 4,
    "pad_token_id": 128004, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "type": "yarn",
    },
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 128005,
}  # fmt: skip
APERTUS = {
    "architectures": ["ApertusForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 68, "hidden_act": "xielu", "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 21504, "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "apertus",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pad_token_id": 3,
    "post_norm": False, "qk_norm": True, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3", "type": "llama3",
    },
    "rope_theta": 12000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.56.0",
    "use_cache": True, "vocab_size": 131072,
}  # fmt: skip
GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attention_multiplier": 0.015625, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 2560, "init_method": "mup", "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 80, "mamba_proj_bias": False, "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 40,
    "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 0,
    "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "rope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
DOTS = {
    "architectures": ["Dots1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 151649,
    "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 10944, "max_position_embeddings": 32768, "max_window_layers": 62, "model_type": "dots1",
    "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 2,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 62,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": None,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 152064,
}  # fmt: skip
K_EXAONE = {
    "architectures": ["ExaoneMoEForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16",
    "eos_token_id": 53, "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "initializer_range": 0.02, "intermediate_size": 18432, "is_moe_layer": [False] + [True] * 47,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 12, "max_position_embeddings": 262144,
    "model_type": "exaone_moe", "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer", "topk_group": 1, "topk_method": "noaux_tc",
    "transformers_version": "5.0.0.dev0", "use_cache": True, "vocab_size": 153600,
}  # fmt: skip
SOLAR_OPEN = {
    "architectures": ["SolarOpenForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 10240, "max_position_embeddings": 131072,
    "model_type": "solar_open", "moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "pad_token_id": 2, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 65536, "type": "yarn"},
    "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 196608,
}  # fmt: skip
YOUTU = {
    "architectures": ["YoutuForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_youtu.YoutuConfig", "AutoModelForCausalLM": "modeling_youtu.YoutuForCausalLM",
    },
    "bos_token_id": 128000, "dtype": "bfloat16", "embedding_initializer_range": 0.03952847075210474,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.01976423537605237, "intermediate_size": 6144, "kv_lora_rank": 512,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "youtu", "num_attention_heads": 16,
    "num_hidden_layers": 32, "num_key_value_heads": 16, "q_lora_rank": 1536, "qk_head_dim": 192,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": True,
    "rope_scaling": None, "rope_theta": 1600000, "tie_word_embeddings": True, "transformers_version": "4.56.0",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 128256,
}  # fmt: skip

GRANITE_MOE = {
    "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
    "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 512,
    "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe", "num_attention_heads": 24,
    "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 40,
    "output_router_logits": False, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000000.0, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "use_cache": True, "vocab_size": 49155,
}  # fmt: skip

PUBLISHED: dict[str, dict[str, Any]] = {
    "OLMo 2 7B": OLMO2,
    "OLMo 2 32B": OLMO2
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64}
    | {"num_key_value_heads": 8},
    "OLMo 3 7B": OLMO3,
    "GLM-4 9B 0414": GLM4,
    "GLM-4 9B Chat": GLM4
    | {"architectures": ["GlmForCausalLM"], "max_position_embeddings": 131072, "model_type": "glm"}
    | {"rms_norm_eps": 1.5625e-07, "transformers_version": "4.46.0.dev0"},
    "GLM-4 32B 0414": GLM4
    | {"attention_bias": False, "hidden_size": 6144, "intermediate_size": 23040, "num_attention_heads": 48}
    | {"num_hidden_layers": 61},
    "Phi-3 mini 4k": PHI3,
    "Phi-3.5 mini": PHI35,
    "Phi-4": PHI4,
    "Phi-4 mini": PHI4_MINI,
    "ERNIE 4.5 0.3B": ERNIE,
    "EXAONE 4.0 32B": EXAONE4,
    "EXAONE 4.0 1.2B": EXAONE4
    | {"head_dim": 64, "hidden_size": 2048, "intermediate_size": 4096, "layer_types": ["full_attention"] * 30}
    | {"max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 30, "sliding_window": None}
    | {"sliding_window_pattern": None, "tie_word_embeddings": True},
    "Seed-OSS 36B": SEED_OSS,
    "AFM 4.5B": AFM,
    "Apertus 8B Instruct": APERTUS,
    "Apertus 70B Instruct": APERTUS
    | {"hidden_size": 8192, "intermediate_size": 43008, "num_attention_heads": 64, "num_hidden_layers": 80},
    "dots.llm1": DOTS,
    "Solar Open 100B": SOLAR_OPEN,
    "K-EXAONE 236B A23B": K_EXAONE,
    "Youtu-LLM 2B": YOUTU,
    "Granite 4.0 Micro": GRANITE4,
    "Granite 3.1 3B A800M": GRANITE_MOE,
}
