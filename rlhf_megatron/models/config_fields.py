"""The fields of a Hugging Face config.json: which are read, which may have one value only, which change nothing.

transformers and vLLM set every field of the file on their config object and read many more than they declare, so one
that is not known may change the model, and is refused by name. Free of torch: ``--dry-run`` checks as a run does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import ModelError
from rlhf_megatron.untrusted import parse_json, read_bytes, shown

# Beyond any model, and small enough that nothing runs out of memory over one of them.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**13,
    "vocab_size": 2**24,
    "max_position_embeddings": 2**23,  # vLLM makes a table of all positions
    "original_max_position_embeddings": 2**23,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
    "num_experts_per_tok": 2**14,
}
_LARGEST_OTHER = 2**20  # any other width or count
_LARGEST_NUMBERS = {"rms_norm_eps": 0.1, "rope_theta": 1e12}
_LARGEST_OTHER_NUMBER = 1e6  # such as factors
_MOST_LABELS = 2**20
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_DROPOUT = ("attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop")

DECODER_FIELDS = {
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_size",
    "intermediate_size", "layer_types", "max_position_embeddings", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "quantization_config", "rope_theta", "tie_word_embeddings", "torch_dtype", "vocab_size",
}  # fmt: skip

# The one value that is supported, which is also what an absent field means.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "bias": False,
    "qk_norm": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "use_mrope": False,
    "logit_scale": 1.0,
    "num_nextn_predict_layers": 0,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    **dict.fromkeys(_DROPOUT, 0.0),  # nothing is dropped in training
}
# What transformers' classes refuse as null, or read as false, though the same field may be absent.
_NEVER_NULL = {
    "attention_bias", "attention_dropout", "auto_map", "chunk_size_feed_forward", "decoder_sparse_step", "hidden_act",
    "initializer_range", "intermediate_size", "is_causal", "is_encoder_decoder", "max_position_embeddings",
    "max_window_layers", "mlp_bias", "norm_topk_prob", "num_experts", "num_labels", "output_router_logits",
    "rms_norm_eps", "router_aux_loss_coef", "tie_word_embeddings", "use_cache", "use_sliding_window",
}  # fmt: skip

# What transformers' class has under these names is not for a file to replace, not even by null.
_OF_THE_CLASS = {
    "_attn_implementation", "_auto_class", "_experts_implementation", "attribute_map", "base_config_key",
    "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan",
    "convert_rope_params_to_dict", "default_rope_type", "default_theta", "dict_dtype_to_str", "from_dict",
    "from_json_file", "from_pretrained", "get_config_dict", "get_mtp_config", "get_text_config",
    "has_no_defaults_at_init", "ignore_keys_at_rope_validation", "is_heterogeneous", "keys_to_ignore_at_inference",
    "nested_rope_parameter_keys", "per_layer_attributes", "per_layer_config", "push_to_hub",
    "register_for_auto_class", "save_pretrained", "standardize_rope_params", "sub_configs", "to_dict",
    "to_diff_dict", "to_json_file", "to_json_string", "update", "update_from_string", "use_return_dict", "validate",
    "validate_architecture", "validate_layer_type", "validate_output_attentions", "validate_rope",
    "validate_token_ids",
}  # fmt: skip

# Without effect on what the model computes, by the types that transformers wants to see.
_FLAGS = {
    "do_sample", "is_decoder", "is_llama_config", "output_attentions", "output_hidden_states", "output_scores",
    "remove_invalid_values", "return_dict", "return_dict_in_generate", "tf_legacy_loss", "torchscript",
    "unsloth_fixed", "use_bfloat16", "use_cache", "use_grouped_mm",
}  # fmt: skip
_WHOLE = {"max_sequence_length", "max_window_layers", "model_max_length", "num_labels", "pretraining_tp"}
_FRACTIONS = {"initializer_range"}
_TABLES = {"id2label", "label2id", "task_specific_params", "transformers.js_config"}
_TEXTS = {
    "finetuning_task", "internal_version", "name_or_path", "prefix", "problem_type", "tokenizer_class",
    "transformers_version", "unsloth_version",
}  # fmt: skip
# How transformers generates; here the recipe says so.
_GENERATION = {
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id",
    "forced_eos_token_id", "length_penalty", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size",
    "num_beam_groups", "num_beams", "num_return_sequences", "repetition_penalty", "sep_token_id", "suppress_tokens",
    "temperature", "top_k", "top_p", "typical_p",
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "attention_bias": (bool,),  # qwen2 has biases in any case, and others may say false only
    "sliding_window": (int,),  # of qwen's, with use_sliding_window; others may not have it
    **dict.fromkeys(_FLAGS, (bool,)),
    **dict.fromkeys(_WHOLE, (int,)),
    **dict.fromkeys(_FRACTIONS, (float,)),
    **dict.fromkeys(_TABLES, (dict,)),
    **dict.fromkeys(_TEXTS, (str,)),
    **dict.fromkeys(_GENERATION, (bool, int, float, str, list)),
}
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number with a point", str: "text"}
_TYPE_NAMES |= {list: "a list", dict: "an object"}


# Two names of the number of layers for multi-token prediction, which are exported where one drafts for the rollout.
LAYERS_LEFT_OUT = ("num_nextn_predict_layers", "num_mtp_layers")


_E4M3 = ("e4m3", "float8_e4m3fn")
# Of a quantisation by blocks; how activations are quantised, and which layers are not, the files and vLLM know.
_QUANTISATION = {
    "activation_scheme", "dequantize", "fmt", "modules_to_not_convert", "quant_method", "scale_fmt",
    "weight_block_size",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FamilyFields:
    """The fields of one ``model_type`` beside those of every decoder.

    ``read``: what its file reads. ``types``: fields without effect, by the types that transformers wants to see.
    ``only``: fields and the one value of each that is supported, which is what an absent field means.
    ``never_null``: fields that transformers' class of this kind refuses as null.
    ``may_be_null``: fields that it takes as null, unlike others.
    ``absent``: sizes that transformers takes for absent fields, where it does not derive them from others.
    ``former_class``: another name that folders have for the class of the language model.
    ``native``: folders have the makers' code too (``auto_map``), in place of which transformers and vLLM have theirs.
    """

    read: frozenset[str] = frozenset()
    types: Mapping[str, tuple[type, ...]] = dataclasses.field(default_factory=dict)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    never_null: tuple[str, ...] = ()
    may_be_null: tuple[str, ...] = ()
    absent: Mapping[str, int] = dataclasses.field(default_factory=dict)
    native: bool = False
    former_class: str = ""


def read_model_json(path: Path) -> Any:
    """Return the value of a JSON file of a model folder; raises ModelError where it is missing or damaged."""
    content = read_bytes(path, ModelError)
    try:
        return parse_json(content.decode("utf-8"), str(path), ModelError)
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{shown(path)}: not valid JSON (byte {error.start} is not UTF-8); download the model again"
        ) from error
    except ModelError as error:
        raise ModelError(f"{error}; download the model again") from error


def unsupported(path: Path, field: str, value: object, supported: str) -> ModelError:
    """Return the error for a field whose value is known and not supported."""
    return ModelError(f"{shown(path)}: {field} is {brief(value)}, which is not supported; supported: {supported}")


def brief(value: object) -> str:
    """Return a value of the config for an error's line, at most 80 characters of it."""
    return shown(repr(value) if isinstance(value, (str, int, float, type(None))) else repr(value)[:1000], 80)


def check_fields(path: Path, config: Mapping[str, Any], own: FamilyFields) -> None:
    """Raise ModelError for the first field of the config at ``path`` that is not known, or has a value that is not."""
    single = {field: value for field, value in _ONLY.items() if field not in own.read} | dict(own.only)
    types = {field: kinds for field, kinds in _TYPES.items() if field not in own.read} | dict(own.types)
    read = DECODER_FIELDS | own.read
    never_null = _NEVER_NULL.union(own.never_null).difference(own.may_be_null)
    for field, value in config.items():
        if field in _OF_THE_CLASS - own.read:
            raise ModelError(
                f"{shown(path)}: {field} is {brief(value)}, and is not for a config.json to say; remove it"
            )
        if value is None:
            if field in never_null and field in single.keys() | types.keys() | read:
                raise ModelError(f"{shown(path)}: {field} is null, which transformers refuses; remove it")
            continue  # not set, whatever it is
        if field in single:
            if not _same(value, single[field]):
                raise unsupported(path, field, value, repr(single[field]))
        elif field in types:
            _check_type(path, field, value, types[field])
        elif field not in read and (field.startswith("__") or not field.startswith("_")):
            raise ModelError(
                f"{shown(path)}: {shown(field, 80)} is {brief(value)}, which this version does not know and which may "
                "change what the model computes; use another model, or remove the field if it does not"
            )


def weight_block(path: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the rows and columns that share a scale in the files of the config at ``path``; None: they are not
    quantised.

    Empty where a matrix has one scale. Raises ModelError for any other quantisation than e4m3 with these scales.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    known = isinstance(given, dict) and given.keys() <= _QUANTISATION
    is_e4m3 = known and given.get("quant_method") == "fp8" and given.get("fmt", "e4m3") in _E4M3
    block: Any = given.get("weight_block_size") if is_e4m3 else None
    if is_e4m3 and block is None and given.get("activation_scheme") == "static":
        return ()
    if not isinstance(block, list) or len(block) != 2 or any(type(size) is not int or size < 1 for size in block):
        raise unsupported(path, "quantization_config", given, "none, or fp8 in e4m3, static or with weight_block_size")
    return block[0], block[1]


def _same(value: object, wanted: object) -> bool:
    """Return whether a value is the wanted one, and no other type that Python calls equal, but for whole numbers."""
    if isinstance(wanted, float):
        return type(value) in (int, float) and value == wanted
    return type(value) is type(wanted) and value == wanted


def _check_type(path: Path, field: str, value: object, types: tuple[type, ...]) -> None:
    if type(value) not in types:
        wanted = " or ".join(_TYPE_NAMES[kind] for kind in types)
        raise ModelError(f"{shown(path)}: {field} is {brief(value)}; it must be {wanted}")


def check_class(
    path: Path, config: Mapping[str, Any], classes: str, language_class: str = "", own: FamilyFields = FamilyFields()
) -> None:
    """Raise ModelError where the config is for another class than the language model or classifier of ``classes``.

    ``own`` says which other names and code its folders may have.
    """
    known = [language_class or f"{classes}ForCausalLM", f"{classes}ForSequenceClassification"]
    named = config.get("architectures") or []
    if not isinstance(named, list) or any(name not in (*known, own.former_class) for name in named):
        raise unsupported(path, "architectures", named, " or ".join(f'["{name}"]' for name in known))
    code = config.get("auto_map", {})
    ignored = ("AutoTokenizer", *(("AutoConfig", "AutoModel", "AutoModelForCausalLM") if own.native else ()))
    if not isinstance(code, dict) or any(name not in ignored for name in code):
        raise ModelError(f"{shown(path)}: auto_map is {brief(code)}: models with code of their own are not supported")
    labels = config.get("id2label") or {}
    if not all(key.isdecimal() and isinstance(label, str) for key, label in labels.items()):
        raise ModelError(f"{shown(path)}: id2label is {brief(labels)}; it must be an object of numbers and labels")
    if not 0 < config.get("num_labels", 1) <= _MOST_LABELS:
        raise ModelError(f"{shown(path)}: num_labels is {brief(config['num_labels'])}; it must be 1 to {_MOST_LABELS}")
    if config.get("problem_type") == "single_label_classification" and (len(labels) or config.get("num_labels")) == 1:
        raise unsupported(path, "problem_type", config["problem_type"], '"regression" for one label')
    for field in ("dtype", "torch_dtype"):
        if config.get(field) is not None and config[field] not in _DTYPES:
            raise unsupported(path, field, config[field], ", ".join(_DTYPES))


def number(path: Path, field: str, values: Mapping[str, Any], default: float | None = None) -> float:
    """Return a number above 0 in the config at ``path``, or in an object of it; ``default`` is for an absent field."""
    value = values.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{shown(path)}: {field} {_not_a('number', field, values)}")
    most = _LARGEST_NUMBERS.get(field, _LARGEST_OTHER_NUMBER)
    if not value <= most or not math.isfinite(value):
        raise ModelError(f"{shown(path)}: {field} is {brief(value)}; it must be at most {most:g}")
    return float(value)


def size(path: Path, field: str, config: Mapping[str, Any], default: int | None = None) -> int:
    """Return a whole number above 0 in the config at ``path``; ``default`` is for a field that is absent or null."""
    value = config.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{shown(path)}: {field} {_not_a('whole number', field, config)}")
    most = _LARGEST.get(field, _LARGEST_OTHER)
    if value > most:
        raise ModelError(f"{shown(path)}: {field} is {_figures(value)}; it must be at most {most:,}")
    return value


def flag(path: Path, field: str, config: Mapping[str, Any]) -> bool:
    """Return a field that is true or false; absent or null means false."""
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{shown(path)}: {field} is {brief(value)}; it must be true or false")
    return bool(value)


def token_ids(path: Path, field: str, config: Mapping[str, Any], vocabulary: int) -> tuple[int, ...]:
    """Return the ids in a field that has one, a list of them or null; each is in the vocabulary."""
    value = config.get(field)
    ids = value if isinstance(value, list) and field == "eos_token_id" else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ModelError(
                f"{shown(path)}: {field} has {brief(token)}; it must be a token id of the vocabulary, 0 to "
                f"{vocabulary - 1}"
            )
    return tuple(ids)


def _not_a(what: str, field: str, values: Mapping[str, Any]) -> str:
    return f"is {brief(values[field])}; it must be a {what} above 0" if field in values else "is missing"


def _figures(value: int) -> str:
    return f"{value:,}" if value < 10**30 else f"{value:.3e}" if value < 10**300 else "beyond 1e300"
