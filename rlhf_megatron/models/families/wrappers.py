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
from rlhf_megatron.models.config_fields import DECODER_FIELDS, FamilyFields, brief, check_fields, unsupported
from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.untrusted import shown

# Fields of the wrapper that are its language model's, and override those of text_config.
_OF_LANGUAGE = (
    "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings",
    "torch_dtype",
)  # fmt: skip
_READ = frozenset({"architectures", "model_type", "text_config", *_OF_LANGUAGE})
_TIED = "tie_word_embeddings"
_NOT_EXPORTED = ("quantization_config", "torch_dtype")
_VISION: dict[str, tuple[type, ...]] = {"vision_config": (dict,)}
_QWEN = _VISION | dict.fromkeys(
    ("image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id"), (int,)
)


@dataclasses.dataclass(frozen=True)
class Wrapper:
    """One ``model_type`` of such models.

    ``classes``: the prefix of the names of transformers' classes. ``languages``: model types of its text_config, first
    that of one that has none. ``types``: fields without effect on text, as in FamilyFields. ``tied``: embeddings are
    tied to the output layer where neither level says so. ``absent``: what transformers takes for absent fields of
    text_config. ``prefixes``: what the names of the decoder's and the output layer's tensors begin with in files.
    """

    classes: str
    languages: tuple[str, ...]
    types: Mapping[str, tuple[type, ...]]
    tied: bool = False
    absent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prefixes: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
    )


WRAPPERS = {
    "gemma3": Wrapper(
        "Gemma3",
        ("gemma3_text",),
        _VISION
        | dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"), (int,)),
        tied=True,
        absent={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    ),
    "mistral3": Wrapper(
        "Mistral3",
        ("mistral", "ministral3"),
        _VISION
        | dict.fromkeys(("image_token_index", "spatial_merge_size"), (int,))
        | {"multimodal_projector_bias": (bool,), "projector_hidden_act": (str,), "vision_feature_layer": (int, list)},
    ),
    "qwen3_5": Wrapper("Qwen3_5", ("qwen3_5_text",), _QWEN),
    "qwen3_5_moe": Wrapper("Qwen3_5Moe", ("qwen3_5_moe_text",), _QWEN),
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
    family = FAMILIES[text["model_type"]]
    own = {field: config[field] for field in _OF_LANGUAGE if config.get(field) is not None}
    return {
        **wrapper.absent,
        _TIED: wrapper.tied,
        **text,
        **own,
        "architectures": [family.language_class or f"{family.classes}ForCausalLM"],
    }


def _checked_text(path: Path, config: Mapping[str, Any], wrapper: Wrapper) -> dict[str, Any]:
    """Return the text_config with its model type."""
    strange = next((field for field in config if field in DECODER_FIELDS - _READ), None)
    if strange is not None:
        raise ModelError(
            f"{shown(path)}: {strange} is {brief(config[strange])}, beside text_config and not in it; remove it"
        )
    check_fields(path, config, FamilyFields(read=_READ, types=wrapper.types))
    classes = f"{wrapper.classes}ForConditionalGeneration"
    if config.get("architectures") not in (None, [classes]):
        raise unsupported(path, "architectures", config["architectures"], f'["{classes}"]')
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise unsupported(path, "text_config", text, "an object, the config of the language model")
    if text.get("model_type", wrapper.languages[0]) not in wrapper.languages:
        kinds = ", ".join(wrapper.languages)
        raise unsupported(path, "text_config's model_type", text["model_type"], kinds)
    both = [given[_TIED] for given in (config, text) if given.get(_TIED) is not None]
    if len(both) == 2 and both[0] != both[1]:
        raise ModelError(
            f"{shown(path)}: {_TIED} is {brief(both[0])}, and {brief(both[1])} in text_config; set both to false where "
            "the weights have an lm_head, else to true"
        )
    return {"model_type": wrapper.languages[0]} | text


def exported_config(path: Path, config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return a wrapper's ``config`` for weights of type ``dtype`` whose language model is not quantised."""
    language = language_config(path, config)
    text = {field: value for field, value in config["text_config"].items() if field not in _NOT_EXPORTED}
    outer = {field: value for field, value in config.items() if field not in _NOT_EXPORTED}
    said = {"dtype": dtype, _TIED: language[_TIED]}
    return outer | said | {"text_config": text | said}
