"""config.json of published models with dense layers, field for field."""

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

PUBLISHED: dict[str, dict[str, Any]] = {
    "OLMo 2 7B": OLMO2,
    "OLMo 2 32B": OLMO2
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64}
    | {"num_key_value_heads": 8},
    "OLMo 3 7B": OLMO3,
    "GLM-4 9B 0414": GLM4,
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
}
