"""Small random Hugging Face models for tests, and the same computations done by transformers and torch alone."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    ApertusConfig,
    ArceeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Kimi_K25Config,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    YoutuConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

# Where flash-linear-attention is installed these compute by its kernels, which do not read a reference on the host.
for _modeling in (modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
    _modeling.torch_chunk_gated_delta_rule = inspect.unwrap(_modeling.torch_chunk_gated_delta_rule)

_VISION = {
    "gemma3": {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2},
    "gemma4": {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "position_embedding_size": 16,
    },
    "kimi_k25": {"num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4},
    "mistral3": {
        "model_type": "pixtral",
        "image_size": 28,
        "patch_size": 14,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "qwen2_5_vl": {"depth": 1, "num_heads": 2, "fullatt_block_indexes": [0]},
    "qwen2_vl": {"depth": 1, "num_heads": 2, "embed_dim": 16},
    "qwen3_vl": {"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "qwen3_5": {"depth": 1, "num_heads": 2, "num_position_embeddings": 16},
    "glm4v": {"depth": 1, "num_heads": 2},
}


def _wrapping(kind: type, vision: str, language: str = "") -> Callable[..., Any]:
    """Return what makes a config of ``kind`` of the fields of its language model, of type ``language``."""
    outer: dict[str, Any] = {"mm_tokens_per_image": 4} if vision == "gemma3" else {}

    def config(tie_word_embeddings: bool, **fields: Any) -> Any:
        tied = {"tie_word_embeddings": tie_word_embeddings}
        inner = {"model_type": language} if language else {}
        tower = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": fields["hidden_size"]} | _VISION[vision]
        return kind(text_config=fields | tied | inner, vision_config=tower, **outer, **tied)

    return config


WRAPPERS = {
    "gemma3": _wrapping(Gemma3Config, "gemma3"),
    "gemma4": _wrapping(Gemma4Config, "gemma4"),
    "gemma4:experts": _wrapping(Gemma4Config, "gemma4"),
    "glm4v": _wrapping(Glm4vConfig, "glm4v"),
    "glm4v_moe": _wrapping(Glm4vMoeConfig, "glm4v"),
    "kimi_k25": _wrapping(Kimi_K25Config, "kimi_k25", "kimi_k2"),
    "mistral3": _wrapping(Mistral3Config, "mistral3", "mistral"),
    "mistral3:mistral4": _wrapping(Mistral3Config, "mistral3", "mistral4"),
    "qwen2_vl": _wrapping(Qwen2VLConfig, "qwen2_vl"),
    "qwen2_5_vl": _wrapping(Qwen2_5_VLConfig, "qwen2_5_vl"),
    "qwen3_vl": _wrapping(Qwen3VLConfig, "qwen3_vl"),
    "qwen3_vl_moe": _wrapping(Qwen3VLMoeConfig, "qwen3_vl"),
    "qwen3_5": _wrapping(Qwen3_5Config, "qwen3_5"),
    "qwen3_5_moe": _wrapping(Qwen3_5MoeConfig, "qwen3_5"),
}
CONFIGS = {
    "apertus": ApertusConfig,
    "arcee": ArceeConfig,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
    "cohere_norms": CohereConfig,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v2_lite": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "deepseek_v3_plain": DeepseekV3Config,
    "dots1": Dots1Config,
    "ernie4_5": Ernie4_5Config,
    "ernie4_5_moe": Ernie4_5_MoeConfig,
    "exaone4": Exaone4Config,
    "exaone4_full": Exaone4Config,
    "exaone_moe": ExaoneMoeConfig,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "gemma4_text": Gemma4TextConfig,
    "gemma4_text_experts": Gemma4TextConfig,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "gpt_oss": GptOssConfig,
    "granite": GraniteConfig,
    "granitemoe": GraniteMoeConfig,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "granitemoehybrid_plain": GraniteMoeHybridConfig,
    "hunyuan_v1_dense": HunYuanDenseV1Config,
    "hunyuan_v1_moe": HunYuanMoEV1Config,
    "llama": LlamaConfig,
    "llama3": LlamaConfig,
    "llama_attention_biases": LlamaConfig,
    "llama_biases": LlamaConfig,
    "ministral3": Ministral3Config,
    "minimax_m2": MiniMaxM2Config,
    "mistral": MistralConfig,
    "mistral4": Mistral4Config,
    "mistral_linear": MistralConfig,
    "mistral_window": MistralConfig,
    "mixtral": MixtralConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "olmoe": OlmoeConfig,
    "phi3": Phi3Config,
    "phi3_long": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen2_window": Qwen2Config,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen2_yarn": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_biases": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_moe_plain": Qwen3MoeConfig,
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig,
    "qwen3_5_text": Qwen3_5TextConfig,
    "qwen3_5_text_heads": Qwen3_5TextConfig,
    "qwen3_next": Qwen3NextConfig,
    "qwen3_next_heads": Qwen3NextConfig,
    "seed_oss": SeedOssConfig,
    "smollm3": SmolLM3Config,
    "solar_open": SolarOpenConfig,
    "youtu": YoutuConfig,
}
# What a family has beside the sizes below. llama3 is a Llama with the scaled rotary embeddings of 3.1 and later, those
# of mistral_linear and qwen2_yarn are scaled otherwise; the plain mixture of experts leaves the weights of the chosen
# experts as the softmax gives them. The Mistral with a window has it in all layers, the Qwen2 in the last two.
WINDOW = 4  # shorter than most rows below
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GROUPED = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_group": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 3,
    "topk_group": 1,
}
_LATENT = {
    "head_dim": 8,
    "kv_lora_rank": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DEEPSEEK_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 64,
    },
}
_V3 = _LATENT | _GROUPED | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
_V2 = _LATENT | _GROUPED | {"norm_topk_prob": False, "n_shared_experts": 2}
_GROWING_YARN = {
    "rope_parameters": _DEEPSEEK_YARN["rope_parameters"] | {"llama_4_scaling_beta": 0.1, "max_position_embeddings": 256}
}
_MISTRAL4 = _LATENT | _GROUPED | _GROWING_YARN | {"head_dim": 32}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "partial_rotary_factor": 0.25,
}
# Pairs of a head of 32 that go by each of the three positions of an image; of GLM-4V half a head turns.
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}}
_HALF_SECTIONS = {"rope_parameters": _SECTIONS["rope_parameters"] | {"mrope_section": [4, 2, 2]}}
_NEXT = _EXPERTS | _DELTA_NET | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [1]}
_MORE_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}  # for tensor and context ranks
_QWEN3_5 = _DELTA_NET | {
    "rope_parameters": _SECTIONS["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
}
_ALPHA = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}}
_GEMMA3 = {
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 48,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}
_GEMMA4 = {
    "attention_k_eq_v": True,
    "final_logit_softcapping": 3.0,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_global_key_value_heads": 2,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
    "sliding_window": WINDOW,
}
_GEMMA4_EXPERTS = _GEMMA4 | {
    "enable_moe_block": True,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "top_k_experts": 2,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}
_GRANITE4 = _GRANITE | {
    "layer_types": ["attention"] * 4,
    "mamba_n_heads": 4,
    "num_local_experts": 0,
    "position_embedding_type": "rope",
    "shared_intermediate_size": 96,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "arcee": {"mlp_bias": True},
    "dots1": _GROUPED | {"routed_scaling_factor": 2.5, "sliding_window": WINDOW, "max_window_layers": 2},
    "ernie4_5_moe": {
        "moe_intermediate_size": 64,
        "moe_k": 2,
        "moe_layer_interval": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 2,
    },
    "exaone4": {"sliding_window": WINDOW},
    "exaone4_full": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "exaone_moe": _EXPERTS
    | {"num_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "sliding_window": WINDOW},
    "cohere": {"logit_scale": 0.5},
    "cohere_norms": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.5, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "deepseek_v2": _V2 | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    "deepseek_v2_lite": _V2 | _DEEPSEEK_YARN | {"n_group": 1, "q_lora_rank": None},
    "deepseek_v3": _V3 | _DEEPSEEK_YARN,
    "deepseek_v3_plain": _V3 | {"q_lora_rank": None},
    # Caps near the products that they cap.
    "gemma2": {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4:experts": _GEMMA4_EXPERTS,
    "gemma4_text": _GEMMA4,
    "gemma4_text_experts": _GEMMA4_EXPERTS,
    "glm4_moe_lite": _LATENT | _GROUPED | {"rms_norm_eps": 1e-6},  # transformers' of latents
    "glm4_moe": _GROUPED
    | {"attention_bias": True, "use_qk_norm": True, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5},
    "glm4v": _HALF_SECTIONS | {"hidden_size": 128, "partial_rotary_factor": 0.5},
    "glm4v_moe": _GROUPED | _HALF_SECTIONS | {"partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5},
    # A limit near what it clamps.
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        # Lower than any published one, so that it is reached. transformers before 5.19 has 7, whatever the config says.
        "swiglu_limit": 0.7 if hasattr(GptOssConfig, "swiglu_limit") else 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "granite": _GRANITE,
    "granitemoe": _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": _GRANITE4,
    "granitemoehybrid_plain": _GRANITE4 | {"position_embedding_type": None},
    "hunyuan_v1_dense": _ALPHA,
    "hunyuan_v1_moe": _ALPHA | {"num_experts": 4, "moe_topk": 2},
    "kimi_k25": _V3 | _DEEPSEEK_YARN,
    "llama3": {
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama_attention_biases": {"attention_bias": True},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "ministral3": _GROWING_YARN,
    "minimax_m2": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        # Not read by transformers before 5.19, which then turns all 32 numbers of a head.
        "rotary_dim": 16 if "convert_rope_params_to_dict" in vars(MiniMaxM2Config) else 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "mistral": {"sliding_window": None},
    "mistral3": {"sliding_window": None},
    "mistral3:mistral4": _MISTRAL4,
    "mistral4": _MISTRAL4 | {"routed_scaling_factor": 2.0},
    "mistral_linear": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "mistral_window": {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "olmoe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
    "olmo3": {
        "sliding_window": WINDOW,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "phi3": {"hidden_size": 128, "sliding_window": WINDOW},
    "phi3_long": {
        "hidden_size": 128,
        "sliding_window": None,
        "original_max_position_embeddings": 64,  # beyond the rows of tests, which have the short factors
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + pair / 10 for pair in range(12)],
            "long_factor": [2.0 + pair / 3 for pair in range(12)],
        },
    },
    "qwen2_window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 80, "mlp_only_layers": [1], "head_dim": 16},
    "qwen2_yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen3_biases": {"attention_bias": True},
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True},
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _EXPERTS | _QWEN3_5 | {"shared_expert_intermediate_size": 80},
    "qwen3_5_moe_text": _EXPERTS | _QWEN3_5 | {"shared_expert_intermediate_size": 80},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_text_heads": _QWEN3_5 | _MORE_HEADS,
    "qwen3_next": _NEXT,
    "qwen3_next_heads": _NEXT | _MORE_HEADS,
    "qwen2_vl": _SECTIONS | {"hidden_size": 128},
    "qwen2_5_vl": _SECTIONS | {"hidden_size": 128},
    "qwen3_vl": _SECTIONS,
    "qwen3_vl_moe": _EXPERTS | _SECTIONS,
    "qwen3_moe_plain": _EXPERTS | {"norm_topk_prob": False},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {field: value for field, value in _GROUPED.items() if field != "first_k_dense_replace"}
    | {"attention_bias": True, "routed_scaling_factor": 2.5},
    "youtu": _LATENT | {"pad_token_id": None},  # whose row transformers makes 0 as it loads, also of tied embeddings
}
# Of these families.
VARIANTS = {
    "cohere_norms",
    "exaone4_full",
    "deepseek_v2_lite",
    "deepseek_v3_plain",
    "gemma4_text_experts",
    "granitemoehybrid_plain",
    "llama3",
    "llama_attention_biases",
    "llama_biases",
    "qwen3_biases",
    "qwen3_5_text_heads",
    "qwen3_next_heads",
    "mistral_linear",
    "mistral_window",
    "phi3_long",
    "qwen2_window",
    "qwen2_yarn",
    "qwen3_moe_plain",
}
PAD = 0  # never among random rows


def make_model(
    folder: Path,
    family: str = "qwen3",
    *,
    tied: bool = True,
    vocabulary: int = 250,
    seed: int = 0,
    classifier: bool = False,
    **fields: Any,
) -> Path:
    """Save a model with 4 layers, 4 heads and 2 key-value heads; every weight random, also norms and biases.

    A ``classifier`` has one label in place of the output layer. ``fields`` of the config may say otherwise.
    """
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": PAD,
    }
    head = {"num_labels": 1} if classifier else {}
    # A copy: some classes write into the objects that they are given.
    config = (CONFIGS | WRAPPERS)[family](**copy.deepcopy(sizes | SPECIAL.get(family, {}) | head | fields))
    kind = AutoModelForSequenceClassification if classifier else auto_class(config)
    model = kind.from_config(config, dtype=torch.float32)
    fill(model, seed)
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_experts(folder)
    if family == "kimi_k25":
        name_as_published(folder)
    return folder


def describe(family: str, **fields: Any) -> dict[str, Any]:
    """Return the ``model_type`` of a model that ``make_model`` makes, and the fields that it has of its own."""
    made = CONFIGS.get(family)
    return {
        "model_type": made.model_type if made else family.partition(":")[0],
        "config": SPECIAL.get(family, {}),
        "sizes": fields,
    }


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder's files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def transpose_experts(folder: Path) -> None:
    """Turn the stacks of experts in a folder, whose makers publish them as the transposes of transformers' own."""
    path = folder / "model.safetensors"
    tensors = load_file(path).items()
    turned = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors}
    save_file(turned, path, {"format": "pt"})


def name_as_published(folder: Path) -> None:
    """Give Kimi-K2.5's class and layers the names of its makers: transformers saves layers of both towers as blocks."""
    path, tensors = folder / "config.json", load_file(folder / "model.safetensors")
    named = json.loads(path.read_text()) | {"architectures": ["KimiK25ForConditionalGeneration"]}
    path.write_text(json.dumps(named))
    renamed = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensors[name] for name in tensors
    }
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def fill(model: Any, seed: int = 0) -> None:
    """Give every weight of a model another random value, also those of norms, biases and what is not trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Norms, and what is like them, about the factor 1, from which some count their weights.
            is_factor = "norm" in name or name.endswith(("router.scale", "router.per_expert_scale"))
            parameter.copy_(parameter + 0.1 * noise if is_factor else 0.08 * noise)
            if model.config.model_type.startswith("gemma4"):
                _scale_as_gemma4(name, parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                buffer.copy_(0.8 + 0.1 * torch.randn(buffer.shape, generator=generator))


def _scale_as_gemma4(name: str, parameter: Tensor) -> None:
    """Give products of normed vectors the spread that they have in other models.

    Those of a query and a key have one of sqrt(head_dim), 6 and 8 here, by which nothing divides them: softmax would be
    nearly one-hot, and two steps of transformers' own in float32 1e-4 from those in float64, not 6e-6. What a router
    multiplies is divided by sqrt(hidden), so that its scores would be within a few hundredths of each other.
    """
    if name.endswith("q_norm.weight"):
        parameter.mul_(len(parameter) ** -0.5)
    if name.endswith("router.scale"):
        parameter.mul_(len(parameter) ** 0.5)


def auto_class(config: Any) -> Any:
    """Return transformers' class for a whole model: with its vision tower, where it has one."""
    is_other = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING  # Mistral 4's language model is among the others
    return AutoModelForImageTextToText if "text_config" in config.sub_configs or is_other else AutoModelForCausalLM


def load_model(folder: Path, **fields: Any) -> Any:
    """Return the folder's model, or one with other ``fields``, in float32 and ready to train (there is no dropout)."""
    kind = auto_class(AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **fields)


def load_classifier(folder: Path) -> Any:
    """Return the same for a folder with a sequence classification model."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def row_values(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Return [tokens of the response]: what a classifier's head says at the token before each, differentiable."""
    hidden = model.model(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
    values: Tensor = model.score(hidden)[len(prompt) - 1 : -1, 0]
    return values


def row_score(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Return a scalar: the classifier's own output for the row, differentiable."""
    score: Tensor = model(torch.tensor([[*prompt, *response]])).logits[0, 0]
    return score


def random_rows(count: int, vocabulary: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Return prompts and responses of ragged lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        values: list[int] = torch.randint(2, vocabulary, (length,), generator=generator).tolist()
        return values

    return [tokens(2, 9) for _ in range(count)], [tokens(1, 14) for _ in range(count)]


def row_logits(model: Any, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
    """Return [tokens of the row, vocabulary]"""
    logits: Tensor = model(torch.tensor([[*prompt, *response]])).logits[0]
    return logits


def row_logprobs(model: Any, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return [tokens of the response]: the logprob of each, differentiable."""
    logits = row_logits(model, prompt, response)[len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(list(response))[:, None])[:, 0]


def train(
    model: Any,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    steps: int,
    learning_rate: float,
    clip: float,
    epsilon: float,
) -> tuple[list[float], list[float]]:
    """Train mean-token negative log likelihood by torch's AdamW; (losses, gradient norms before clipping)."""

    def loss() -> Tensor:
        return -torch.cat([row_logprobs(model, p, r) for p, r in zip(prompts, responses, strict=True)]).mean()

    return optimise(model, loss, steps, learning_rate, clip, epsilon)


def optimise(
    model: Any, loss: Callable[[], Tensor], steps: int, learning_rate: float, clip: float, epsilon: float
) -> tuple[list[float], list[float]]:
    """Take steps of torch's AdamW towards a smaller ``loss()``; (losses, gradient norms before clipping)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0, eps=epsilon)
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        losses.append(float(value.detach()))
        optimizer.step()
    return losses, norms
