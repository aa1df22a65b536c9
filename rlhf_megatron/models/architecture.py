"""What a model is: the fields of a Hugging Face config that matter here, checked, and Megatron's config made from them.

One entry in ``_FAMILIES`` per supported ``model_type``. A config that asks for anything else is refused by the name of
the field. Weights and their names are the matter of ``weight_map``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_megatron.errors import UserError
from rlhf_megatron.topology.layout import Layout

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Head = Literal["language", "scalar"]
VOCABULARY_MULTIPLE = 64  # vLLM pads to it too, so that equal layouts have equal shards


class ModelError(UserError):
    """A model folder that is missing, damaged or of a kind that is not supported."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What the decoder layers of one Hugging Face ``model_type`` have, and what transformers' classes begin with.

    ``only``: fields of its config and the one value of each that is supported, which is what an absent field means.
    """

    classes: str
    query_key_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False
    only: tuple[tuple[str, Any], ...] = ()


_FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", only=(("sliding_window", None),)),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", query_key_norm=True),
    "qwen3_moe": Family(
        "Qwen3Moe", query_key_norm=True, experts=True, only=(("decoder_sparse_step", 1), ("mlp_only_layers", []))
    ),
}
_ONLY = (
    ("hidden_act", "silu"),
    ("mlp_bias", False),
    ("use_sliding_window", False),
    ("partial_rotary_factor", 1.0),
    ("quantization_config", None),
)


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each feed-forward layer (arXiv 1701.06538); every token reaches its ``chosen``.

    The router's weights are a softmax over all experts; with ``normalized`` those of the chosen are made to sum to 1.
    """

    count: int
    chosen: int
    feed_forward: int
    normalized: bool


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The shape of a decoder-only transformer, in the field's terms; ``feed_forward`` is not used where it has experts.

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
    experts: Experts | None = None

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
        """Raises ModelError where this model cannot be cut into ``layout``.

        Key-value heads fewer than tensor ranks are shared: Megatron computes them in parts and gathers them.
        """
        if self.heads % layout.tensor:
            raise ModelError(
                f"layout.tensor={layout.tensor} does not divide the model's {self.heads} attention heads; "
                f"use a divisor of {self.heads}, or pipeline instead"
            )
        if self.key_value_heads % layout.tensor and layout.tensor % self.key_value_heads:
            raise ModelError(
                f"layout.tensor={layout.tensor} neither divides the model's {self.key_value_heads} key-value heads nor "
                "is a multiple of them; change it, or use pipeline instead"
            )
        self._check_feed_forward(layout)
        layout.stage_chunks(self.layers)

    def _check_feed_forward(self, layout: Layout) -> None:
        if self.experts is None:
            if layout.expert > 1 or layout.expert_parts != layout.tensor:
                raise ModelError("layout.expert and expert_tensor are for mixtures of experts; the model is dense")
            if self.feed_forward % layout.tensor:
                raise ModelError(f"layout.tensor={layout.tensor} does not divide intermediate_size {self.feed_forward}")
            return
        if self.experts.count % layout.expert:
            raise ModelError(f"layout.expert={layout.expert} does not divide the model's {self.experts.count} experts")
        if self.experts.feed_forward % layout.expert_parts:
            raise ModelError(
                f"layout.expert_tensor={layout.expert_parts} (by default tensor) does not divide "
                f"moe_intermediate_size {self.experts.feed_forward}"
            )


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
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); download the model again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return config


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, float | None]:
    """(theta, factor of Llama 3's scaling or None), from either spelling that transformers has used."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    for field, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise ModelError(f"{path}: {field} must be an object; it is {value!r}")
        if value.get("partial_rotary_factor") not in (None, 1.0):
            raise _unsupported(path, f"{field}.partial_rotary_factor", value["partial_rotary_factor"], "1.0")
    theta = _number(path, "rope_theta", parameters if "rope_theta" in parameters else config, 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _unsupported(path, "rope_scaling.rope_type", kind, "default, llama3")
    fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for field, value in fixed.items():  # Megatron-core has these as constants
        if scaling.get(field, value) != value:
            raise _unsupported(path, f"rope_scaling.{field}", scaling[field], str(value))
    return theta, _number(path, "factor", scaling)


def _number(path: Path, field: str, values: dict[str, Any], default: float | None = None) -> float:
    """A number above 0 in the config at ``path``, or in an object of it; ``default`` is for an absent field."""
    value = values.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{path}: {field} {_not_a('number', field, values)}")
    return float(value)


def _size(path: Path, field: str, config: dict[str, Any], default: int | None = None) -> int:
    """A whole number above 0 in the config at ``path``; ``default`` is for a field that is absent or null."""
    value = config.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {field} {_not_a('whole number', field, config)}")
    return value


def _not_a(what: str, field: str, values: dict[str, Any]) -> str:
    return f"is {values[field]!r}; it must be a {what} above 0" if field in values else "is missing"


def _experts(path: Path, config: dict[str, Any]) -> Experts:
    return Experts(
        count=_size(path, "num_local_experts" if "num_local_experts" in config else "num_experts", config),
        chosen=_size(path, "num_experts_per_tok", config),
        feed_forward=_size(path, "moe_intermediate_size", config),
        normalized=bool(config.get("norm_topk_prob", False)),
    )


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
    for field, wanted in (*_ONLY, *family.only):
        if config.get(field) not in (None, wanted):
            raise _unsupported(path, field, config[field], repr(wanted))
    if config.get("attention_bias", False) and not family.qkv_bias:
        raise _unsupported(path, "attention_bias", True, f"False for {kind}")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        found = sorted(set(map(str, layer_types))) if isinstance(layer_types, list) else layer_types
        raise _unsupported(path, "layer_types", found, "full_attention in every layer")
    theta, factor = _rope(path, config)
    heads, hidden = _size(path, "num_attention_heads", config), _size(path, "hidden_size", config)
    end = config.get("eos_token_id")
    return Architecture(
        family=kind,
        layers=_size(path, "num_hidden_layers", config),
        hidden=hidden,
        feed_forward=_size(path, "intermediate_size", config),
        heads=heads,
        key_value_heads=_size(path, "num_key_value_heads", config, heads),
        head_dim=_size(path, "head_dim", config, hidden // heads),
        vocabulary=_size(path, "vocab_size", config),
        max_positions=_size(path, "max_position_embeddings", config, 4096),
        norm_epsilon=_number(path, "rms_norm_eps", config, 1e-6),
        rope_theta=theta,
        rope_scaling_factor=factor,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        query_key_norm=family.query_key_norm,
        qkv_bias=family.qkv_bias,
        pad_token_id=config.get("pad_token_id"),
        end_token_ids=tuple(end) if isinstance(end, list) else () if end is None else (end,),
        experts=_experts(path, config) if family.experts else None,
    )


def transformer_config(
    architecture: Architecture,
    layout: Layout,
    dtype: str,
    *,
    sequence_parallel: bool = False,
    cp_comm_type: str = "p2p",
    recompute_granularity: str = "none",
    recompute_layers: int | None = None,
    fused: bool = False,
    deterministic: bool = False,
) -> TransformerConfig:
    """Megatron's config for ``architecture`` cut into ``layout``, computing in ``dtype``, one of torch's types by name.

    ``fused`` asks for Transformer Engine's kernels for rotary embeddings and activations, and for its grouped experts.
    ``deterministic`` asks for Megatron's own kernels that give the same bits each time.

    Losses are sums over tokens that already carry their global weight (``calculate_per_token_loss``: data-parallel
    ranks are added up, never averaged), so gradients do not depend on micro-batches or on how rows fall onto ranks.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    compute_dtype: torch.dtype = getattr(torch, dtype)
    stages = [sum(map(len, chunks)) for chunks in layout.stage_chunks(architecture.layers)]
    uneven = layout.pipeline > 1 and len(set(stages)) > 1
    if architecture.experts is not None:
        # Megatron sends each tensor rank's own tokens to the experts, so the sequence has to be cut.
        sequence_parallel = True
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
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        num_layers_in_first_pipeline_stage=stages[0] if uneven else None,
        num_layers_in_last_pipeline_stage=stages[-1] if uneven else None,
        context_parallel_size=layout.context,
        cp_comm_type=cp_comm_type,
        sequence_parallel=sequence_parallel and layout.tensor > 1,
        params_dtype=compute_dtype,
        pipeline_dtype=compute_dtype,
        bf16=compute_dtype == torch.bfloat16,
        fp16=compute_dtype == torch.float16,
        variable_seq_lengths=layout.virtual_pipeline == 1,  # the interleaved schedule would wait for shapes in a circle
        moe_token_dispatcher_type="alltoall",  # asked for by variable_seq_lengths, also without experts
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        # Transformer Engine's SwiGLU has no grouped form, so experts keep Megatron's.
        use_te_activation_func=fused and architecture.experts is None,
        bias_activation_fusion=fused and architecture.experts is not None,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        deterministic_mode=deterministic,
        deallocate_pipeline_outputs=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=True,
        **_recompute_config(recompute_granularity, recompute_layers),
        **_experts_config(architecture.experts, layout, dtype == "float32", fused),
    )


def _recompute_config(granularity: str, layers: int | None) -> dict[str, Any]:
    """Megatron's settings of ``granularity`` "none", "selective" or "full", of all layers or of ``layers`` a chunk."""
    if granularity == "none":
        return {}
    if granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    method = {"recompute_method": "uniform", "recompute_num_layers": 1}
    if layers is not None:
        method = {"recompute_method": "block", "recompute_num_layers": layers}
    return {"recompute_granularity": "full"} | method


def _experts_config(experts: Experts | None, layout: Layout, float32: bool, fused: bool) -> dict[str, Any]:
    """Megatron's settings of a mixture: no token is dropped, and no loss is added that would balance the experts."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.feed_forward,
        "moe_router_topk": experts.chosen,
        # The softmax of the chosen logits alone is that of all of them made to sum to 1 over the chosen.
        "moe_router_pre_softmax": not experts.normalized,
        # Where Transformer Engine is installed, Megatron's router has it multiply, which takes float32 for TF32.
        "moe_router_dtype": "fp64" if float32 else "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_parts,
    }
