"""What a model is: the fields of a Hugging Face config that matter here, checked, and Megatron's config made from them.

One entry in ``_FAMILIES`` per supported ``model_type``. A config that asks for anything else is refused by the name of
the field. Weights and their names are the matter of ``weight_map``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_megatron.recipe.errors import UserError
from rlhf_megatron.topology.layout import Layout

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Head = Literal["language", "scalar"]
VOCABULARY_MULTIPLE = 64  # vLLM pads to it too, so that equal layouts have equal shards


class ModelError(UserError):
    """A model folder that is missing, damaged or of a kind that is not supported."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What the decoder layers of one Hugging Face ``model_type`` have, and what transformers' classes begin with."""

    classes: str
    query_key_norm: bool = False
    qkv_bias: bool = False


_FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral"),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", query_key_norm=True),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The shape of a dense decoder-only transformer, in the field's terms.

    ``head`` is what reads the decoder's output: the logits of the next token, or one number per token (``heads``).
    """

    family: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling_factor: float | None
    tied_embeddings: bool
    query_key_norm: bool
    qkv_bias: bool
    end_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    head: Head = "language"

    def with_head(self, head: Head) -> Architecture:
        """The same decoder under another head."""
        return dataclasses.replace(self, head=head)

    def padded_vocabulary(self, tensor: int) -> int:
        """Rows of the embedding over all ranks: a multiple of 64 that ``tensor`` divides."""
        multiple = VOCABULARY_MULTIPLE
        while multiple % tensor:
            multiple += VOCABULARY_MULTIPLE
        return -(-self.vocabulary // multiple) * multiple

    def check_layout(self, layout: Layout) -> None:
        """Raises ModelError where this model cannot be cut into ``layout``."""
        for name, count in (("attention heads", self.heads), ("key-value heads", self.key_value_heads)):
            if count % layout.tensor:
                raise ModelError(
                    f"layout.tensor={layout.tensor} does not divide the model's {count} {name}; "
                    f"use a divisor of {count}, or pipeline instead"
                )
        if self.feed_forward % layout.tensor:
            raise ModelError(f"layout.tensor={layout.tensor} does not divide intermediate_size {self.feed_forward}")
        layout.stage_layers(self.layers)


def classifier_config(config: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face ``config`` as that of the same decoder with a scalar head: sequence classification, one label."""
    return config | {
        "architectures": [f"{_FAMILIES[config['model_type']].classes}ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def _unsupported(path: Path, field: str, value: object, supported: str) -> ModelError:
    return ModelError(f"{path}: {field} is {value!r}, which is not supported; supported: {supported}")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face folder; raises ModelError where it is missing or damaged."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelError(f"{path}: no such file; model.path must be a folder in Hugging Face format")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return config


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, float | None]:
    """(theta, factor of Llama 3's scaling or None), from either spelling that transformers has used."""
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    scaling = config.get("rope_scaling") or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise _unsupported(path, "rope_scaling.rope_type", kind, "default, llama3")
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for field, value in fixed.items():  # Megatron-core has these as constants
        if scaling.get(field, value) != value:
            raise _unsupported(path, f"rope_scaling.{field}", scaling[field], str(value))
    return float(theta), float(scaling["factor"])


def read_architecture(folder: str | Path) -> Architecture:
    """Reads and checks ``config.json`` in ``folder``; raises ModelError naming the field that is not supported."""
    return parse_architecture(read_config(folder), folder)


def parse_architecture(config: dict[str, Any], folder: str | Path) -> Architecture:
    """The architecture of a Hugging Face ``config``; ``folder`` is where it is from, for errors (see ModelError)."""
    path = Path(folder) / "config.json"
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise _unsupported(path, "model_type", kind, ", ".join(sorted(_FAMILIES)))
    family = _FAMILIES[kind]
    for field, wanted in (("hidden_act", "silu"), ("mlp_bias", False), ("use_sliding_window", False)):
        if config.get(field, wanted) != wanted:
            raise _unsupported(path, field, config[field], repr(wanted))
    if config.get("attention_bias", False) and not family.qkv_bias:
        raise _unsupported(path, "attention_bias", True, f"False for {kind}")
    if kind == "mistral" and config.get("sliding_window"):
        raise _unsupported(path, "sliding_window", config["sliding_window"], "null")
    if config.get("quantization_config"):
        raise _unsupported(path, "quantization_config", "set", "unquantised weights")
    try:
        theta, factor = _rope(path, config)
        heads = int(config["num_attention_heads"])
        end = config.get("eos_token_id")
        return Architecture(
            family=kind,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            feed_forward=int(config["intermediate_size"]),
            heads=heads,
            key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocabulary=int(config["vocab_size"]),
            max_positions=int(config.get("max_position_embeddings", 4096)),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling_factor=factor,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            query_key_norm=family.query_key_norm,
            qkv_bias=family.qkv_bias,
            pad_token_id=config.get("pad_token_id"),
            end_token_ids=tuple(end) if isinstance(end, list) else () if end is None else (end,),
        )
    except KeyError as error:
        raise ModelError(f"{path}: {error.args[0]} is missing") from error


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    dtype: str,
    *,
    sequence_parallel: bool = False,
    recompute_granularity: str = "none",
    recompute_layers: int | None = None,
    fused: bool = False,
) -> TransformerConfig:
    """Megatron's config for ``architecture`` cut into ``layout``, computing in ``dtype`` ("float32" or "bfloat16").

    ``fused`` asks for Transformer Engine's kernels for rotary embeddings and activations.

    Losses are sums over tokens that already carry their global weight (``calculate_per_token_loss``: data-parallel
    ranks are added up, never averaged), so gradients do not depend on micro-batches or on how rows fall onto ranks.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    compute_dtype: torch.dtype = getattr(torch, dtype)
    stages = layout.stage_layers(architecture.layers)
    uneven = layout.pipeline > 1 and len({len(stage) for stage in stages}) > 1
    recompute: dict[str, Any] = {}
    if recompute_granularity == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        if recompute_layers is not None:
            recompute |= {"recompute_method": "block", "recompute_num_layers": recompute_layers}
    elif recompute_granularity == "selective":
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        ffn_hidden_size=architecture.feed_forward,
        num_attention_heads=architecture.heads,
        num_query_groups=architecture.key_value_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_epsilon,
        qk_layernorm=architecture.query_key_norm,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        num_layers_in_first_pipeline_stage=len(stages[0]) if uneven else None,
        num_layers_in_last_pipeline_stage=len(stages[-1]) if uneven else None,
        sequence_parallel=sequence_parallel and layout.tensor > 1,
        params_dtype=compute_dtype,
        pipeline_dtype=compute_dtype,
        bf16=compute_dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, also without experts
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
        attention_softmax_in_fp32=True,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=True,
        **recompute,
    )
