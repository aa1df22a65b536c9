"""Models of images and text of which the language model alone is trained: config.json has it as its text_config.

The names of its weights in files, and what becomes of the other towers', are the matter of ``file_form``. Free of
torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import DECODER_FIELDS, FamilyFields, brief, check_fields, size, unsupported
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.models.families.image_positions import without_sections
from rlhf_megatron.untrusted import shown

# Fields of the wrapper that are its language model's, and override those of text_config.
_OF_LANGUAGE = (
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings",
    "torch_dtype",
)  # fmt: skip
_READ = frozenset({"architectures", "model_type", "text_config", *_OF_LANGUAGE})
_TIED = "tie_word_embeddings"
_NOT_EXPORTED = ("quantization_config", "torch_dtype")
_ONLY = {"language_model_only": False}  # of Qwen3.6's wrapper: it has its vision tower
_VISION: dict[str, tuple[type, ...]] = {"vision_config": (dict,)}
_IDS = ("image_token_id", "video_token_id")
_QWEN = _VISION | dict.fromkeys((*_IDS, "vision_end_token_id", "vision_start_token_id"), (int,))
_GLM = _VISION | dict.fromkeys(
    (*_IDS, "image_end_token_id", "image_start_token_id", "video_end_token_id", "video_start_token_id"), (int,)
)
_INSIDE = ("model.language_model.", "lm_head.")
_OUTSIDE = ("model.", "lm_head.")  # as of the language model alone; the towers' names then begin with their own


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """One ``model_type`` of such models.

    ``classes``: what the names of its classes begin with in config.json. ``languages``: the family of each model type
    that text_config may have, first that of one that has none. ``types``: fields without effect on text, as in
    FamilyFields.
    ``tied``: embeddings are tied to the output layer where neither level says so. ``flat``: config.json may have the
    fields of text_config itself, and embeddings are tied where either level says so. ``only``: fields of text_config of
    which transformers computes one value, whatever they say. ``absent``: what it takes for those that are absent.
    ``divided_heads``: it takes hidden_size / num_attention_heads for the size of a head. ``prefixes``: what names of
    the decoder's and the output layer's tensors begin with in files. ``transposed_experts``: where all experts of a
    layer are one tensor there, it may be transposed. ``text_tied``: transformers writes into every text_config that
    embeddings are tied, where it goes by what the wrapper says. ``joint_adapters``: PEFT and vLLM read the adapters of
    all experts of a layer as one, and no expert's own.
    """

    classes: str
    languages: Mapping[str, str]
    types: Mapping[str, tuple[type, ...]]
    tied: bool = False
    flat: bool = False
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    divided_heads: bool = False
    prefixes: tuple[tuple[str, str], ...] = (("language_model.model.", "language_model.lm_head."), _INSIDE)
    transposed_experts: bool = False
    text_tied: bool = False
    joint_adapters: bool = False


def _qwen2_vl(classes: str, language: str) -> Wrapper:
    """Return the wrapper of Qwen2 with images, of which there are two."""
    return Wrapper(
        classes,
        {language: "qwen2"},
        _QWEN | {"vision_token_id": (int,)},
        flat=True,
        absent={"max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        divided_heads=True,
        prefixes=(_INSIDE, _OUTSIDE),
    )


# What the classes of Qwen3-VL do not read, and those of the language model alone do.
_NO_WINDOWS = {"use_sliding_window": False}

WRAPPERS = {
    "gemma3": Wrapper(
        "Gemma3",
        {"gemma3_text": "gemma3_text"},
        _VISION
        | dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"), (int,)),
        tied=True,
        absent={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    ),
    "gemma4": Wrapper(
        "Gemma4",
        {"gemma4_text": "gemma4_text"},
        _VISION
        | dict.fromkeys((*_IDS, "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id"), (int,))
        | dict.fromkeys(("eoa_token_index", "eoi_token_id", "vision_soft_tokens_per_image"), (int,))
        | {"audio_config": (dict,)},
        tied=True,
        prefixes=(_INSIDE,),
    ),
    "glm4v": Wrapper(
        "Glm4v",
        {"glm4v_text": "glm4"},
        _GLM,
        flat=True,
        only={"attention_bias": True},
        absent={"max_position_embeddings": 32768, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
        divided_heads=True,
        prefixes=(_INSIDE,),
    ),
    "glm4v_moe": Wrapper(
        "Glm4vMoe",
        {"glm4v_moe_text": "glm4_moe"},
        _GLM,
        flat=True,
        only={"use_qk_norm": False},
        absent={"attention_bias": True, "max_position_embeddings": 65536},
        prefixes=(_INSIDE,),
    ),
    "kimi_k25": Wrapper(
        "KimiK25",
        {"deepseek_v3": "deepseek_v3", "kimi_k2": "deepseek_v3"},  # transformers knows the former name alone
        _VISION
        | dict.fromkeys((*_IDS, "ignore_index", "media_placeholder_token_id", "projection_hidden_size"), (int,))
        | dict.fromkeys(("vision_end_token_id", "vision_start_token_id"), (int,))
        | {"auto_map": (dict,), "projection_layer_norm_eps": (float,), "use_unified_vision_chunk": (bool,)}
        | {"video_placeholder": (str,)},
    ),
    "mistral3": Wrapper(
        "Mistral3",
        {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"},
        _VISION
        | dict.fromkeys(("image_token_index", "spatial_merge_size"), (int,))
        | {"multimodal_projector_bias": (bool,), "projector_hidden_act": (str,), "vision_feature_layer": (int, list)},
    ),
    "qwen2_vl": _qwen2_vl("Qwen2VL", "qwen2_vl_text"),
    "qwen2_5_vl": _qwen2_vl("Qwen2_5_VL", "qwen2_5_vl_text"),
    "qwen3_vl": Wrapper(
        "Qwen3VL",
        {"qwen3_vl_text": "qwen3"},
        _QWEN,
        only=_NO_WINDOWS,
        absent={"max_position_embeddings": 128_000, "rope_theta": 500_000.0},
        prefixes=(_INSIDE,),
    ),
    "qwen3_vl_moe": Wrapper(
        "Qwen3VLMoe",
        {"qwen3_vl_moe_text": "qwen3_moe"},
        _QWEN,
        only=_NO_WINDOWS | {"norm_topk_prob": True},
        absent={"max_position_embeddings": 128_000, "num_key_value_heads": 16, "rope_theta": 500_000.0},
        prefixes=(_INSIDE,),
        transposed_experts=True,
        text_tied=True,
        joint_adapters=True,
    ),
    "qwen3_5": Wrapper("Qwen3_5", {"qwen3_5_text": "qwen3_5_text"}, _QWEN),
    "qwen3_5_moe": Wrapper("Qwen3_5Moe", {"qwen3_5_moe_text": "qwen3_5_moe_text"}, _QWEN, joint_adapters=True),
}


def wrapper_of(config: Mapping[str, Any]) -> Wrapper | None:
    """Return the wrapper that a config.json is of, None where it is a language model's own."""
    kind = config.get("model_type")
    return WRAPPERS.get(kind) if isinstance(kind, str) else None


def wrapper_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return lines about what is left out of the model, for the person who starts a run."""
    if wrapper_of(config) is None:
        return ()
    return (f"of {config['model_type']} the language model is loaded; exports have the other towers as they were",)


def module_prefix(config: Mapping[str, Any]) -> str:
    """Return what the names of the decoder's modules begin with in transformers' class of the model."""
    return "model." if wrapper_of(config) is None else "model.language_model."


def language_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model alone, as its own folder had it; of one that is alone, ``config``.

    Raises ModelError where a field of the wrapper in the file at ``path`` is not known, or the two levels disagree.
    """
    wrapper = wrapper_of(config)
    if wrapper is None:
        return config
    text = _checked_text(path, config, wrapper)
    kind = wrapper.languages[text["model_type"]]
    family = FAMILIES[kind]
    own = {field: config[field] for field in _OF_LANGUAGE if config.get(field) is not None}
    if wrapper.flat:
        own[_TIED] = config.get(_TIED) or text.get(_TIED) or False
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    return {
        **{field: value for field, value in wrapper.absent.items() if not isinstance(rope, dict) or field not in rope},
        _TIED: wrapper.tied,
        **(text if kind == text["model_type"] else without_sections(path, text)),
        **wrapper.only,
        **own,
        "model_type": kind,
        "architectures": [family.language_class or f"{family.classes}ForCausalLM"],
    }


def _checked_text(path: Path, config: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    """Return the fields of the language model with the model type of its text_config."""
    is_flat = wrapper.flat and config.get("text_config") is None
    text = config if is_flat else config.get("text_config")
    if not isinstance(text, dict):
        raise unsupported(path, "text_config", text, "an object, the config of the language model")
    outer = {field: value for field, value in config.items() if field in _READ or field in wrapper.types or not is_flat}
    if not is_flat:
        _check_beside_text(path, config, text, wrapper)
    check_fields(path, outer, FamilyFields(read=_READ, types=wrapper.types, only=_ONLY))
    classes = f"{wrapper.classes}ForConditionalGeneration"
    if config.get("architectures") not in (None, [classes]):
        raise unsupported(path, "architectures", config["architectures"], f'["{classes}"]')
    first = next(iter(wrapper.languages))
    kind = first if is_flat else text.get("model_type", first)
    if not isinstance(kind, str) or kind not in wrapper.languages:
        raise unsupported(path, "text_config's model_type", kind, ", ".join(wrapper.languages))
    text = {field: value for field, value in text.items() if field not in (*wrapper.types, "text_config")}
    _check_text(path, text, wrapper)
    return text | {"model_type": kind}


def _check_beside_text(path: Path, config: Mapping[str, Any], text: Mapping[str, Any], wrapper: Wrapper) -> None:
    """Raise ModelError for what is said of the language model in the wrapper, and not as in ``text``."""
    for field, value in config.items():
        is_repeated = wrapper.flat and field in text and (text[field] == value or field == "sliding_window")
        if field in DECODER_FIELDS - _READ - wrapper.types.keys() and not is_repeated:
            raise ModelError(f"{shown(path)}: {field} is {brief(value)}, and text_config does not say so; remove it")
    both = [] if wrapper.flat else [given[_TIED] for given in (config, text) if given.get(_TIED) is not None]
    if len(both) == 2 and both[0] != both[1] and not (wrapper.text_tied and both[1]):
        raise ModelError(
            f"{shown(path)}: {_TIED} is {brief(both[0])}, and {brief(both[1])} in text_config; set both to false where "
            "the weights have an lm_head, else to true"
        )


def _check_text(path: Path, text: Mapping[str, Any], wrapper: Wrapper) -> None:
    """Raise ModelError where transformers' class of the wrapper computes something else than that of the family."""
    for field, value in wrapper.only.items():
        if text.get(field) not in (None, value):
            raise unsupported(path, field, text[field], brief(value))
    if wrapper.divided_heads and text.get("head_dim") is not None:
        divided = size(path, "hidden_size", text) // size(path, "num_attention_heads", text)
        if text["head_dim"] != divided:
            raise unsupported(path, "head_dim", text["head_dim"], f"hidden_size / num_attention_heads, {divided}")


def exported_config(path: Path, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a wrapper's ``config`` for weights of type ``dtype`` whose language model is not quantised."""
    language = language_config(path, config)
    outer = {field: value for field, value in config.items() if field not in _NOT_EXPORTED}
    said = {"dtype": dtype, _TIED: language[_TIED]}
    if config.get("text_config") is None:
        return outer | said
    text = {field: value for field, value in config["text_config"].items() if field not in _NOT_EXPORTED}
    return outer | said | {"text_config": text | said}
