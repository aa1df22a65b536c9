"""The model families: one line here, one file beside it (docs/new_model.md). Free of torch."""

from __future__ import annotations

import importlib

from rlhf_megatron.models.families.contract import Family

# Hugging Face's model_type and the module of this package that has its FAMILY.
_MODULES = {
    "apertus": "apertus",
    "arcee": "arcee",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5_moe",
    "exaone4": "exaone4",
    "exaone_moe": "exaone_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3_text",
    "gemma4_text": "gemma4_text",
    "glm": "glm",
    "glm4": "glm4",
    "glm4_moe": "glm4_moe",
    "glm4_moe_lite": "glm4_moe_lite",
    "gpt_oss": "gpt_oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitemoehybrid",
    "hunyuan_v1_dense": "hunyuan_v1_dense",
    "hunyuan_v1_moe": "hunyuan_v1_moe",
    "kimi_k2": "kimi_k2",
    "llama": "llama",
    "minimax_m2": "minimax_m2",
    "ministral3": "ministral3",
    "mistral": "mistral",
    "mistral4": "mistral4",
    "mixtral": "mixtral",
    "olmo2": "olmo2",
    "olmo3": "olmo3",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe_text",
    "qwen3_5_text": "qwen3_5_text",
    "qwen3_next": "qwen3_next",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "solar_open": "solar_open",
    "youtu": "youtu",
}

# Models that draft for another one, which no config.json calls so: they are read by ``draft_heads``.
_DRAFTS = {"eagle3_head": "eagle3_head"}

MODEL_TYPES = tuple(_MODULES)
FAMILIES: dict[str, Family] = {
    name: importlib.import_module(f"{__name__}.{module}").FAMILY for name, module in (_MODULES | _DRAFTS).items()
}
