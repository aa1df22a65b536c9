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

PUBLISHED: dict[str, dict[str, Any]] = {
    "OLMo 2 7B": OLMO2,
    "OLMo 2 32B": OLMO2
    | {"hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64}
    | {"num_key_value_heads": 8},
    "OLMo 3 7B": OLMO3,
}
