"""What a model is: the fields of a Hugging Face config that matter here, checked, and Megatron's config made from them.

Which kinds of model there are is the matter of ``families``, and what is not read here is refused by the name of the
field (``config_fields``). Weights and their names are the matter of ``weight_map``.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_megatron.errors import ModelError
from rlhf_megatron.models.config_fields import (
    brief,
    check_class,
    check_fields,
    flag,
    number,
    read_model_json,
    size,
    token_ids,
    unsupported,
)
from rlhf_megatron.models.families import FAMILIES, Family
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.untrusted import shown

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Head = Literal["language", "scalar"]
VOCABULARY_MULTIPLE = 64  # vLLM pads to it too, so that equal layouts have equal shards
# Megatron-core has these of Llama 3's scaling as constants.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


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
        """Raises ModelError, or RecipeError of its stages, where this model cannot be cut into ``layout``.

        The line begins with the layout's key. Key-value heads fewer than tensor ranks are shared: Megatron computes
        them in parts and gathers them.
        """
        _check_divides("tensor", layout.tensor, self.heads, "attention heads (num_attention_heads)")
        if self.key_value_heads % layout.tensor and layout.tensor % self.key_value_heads:
            raise ModelError(
                f"layout.tensor={layout.tensor} neither divides the model's {self.key_value_heads} key-value heads "
                "(num_key_value_heads) nor is a multiple; change it"
            )
        self._check_feed_forward(layout)
        layout.stage_layers(self.layers)

    def _check_feed_forward(self, layout: Layout) -> None:
        if self.experts is not None:
            _check_divides("expert", layout.expert, self.experts.count, "experts (num_experts)")
            columns = "columns of an expert (moe_intermediate_size)"
            _check_divides("expert_tensor", layout.expert_parts, self.experts.feed_forward, columns)
            return
        if layout.expert > 1 or layout.expert_parts != layout.tensor:
            raise ModelError(
                "layout.expert and expert_tensor are for models with experts, and the model is dense; leave them out"
            )
        columns = "columns of the feed-forward layers (intermediate_size)"
        _check_divides("tensor", layout.tensor, self.feed_forward, columns)


def _check_divides(key: str, degree: int, count: int, what: str) -> None:
    if count % degree:
        raise ModelError(
            f"layout.{key}={degree} does not divide the model's {count} {what}; use a divisor of {count}, or pipeline"
        )


def classifier_config(config: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face ``config`` as that of the same decoder with a scalar head: sequence classification, one label."""
    return config | {
        "architectures": [f"{FAMILIES[config['model_type']].classes}ForSequenceClassification"],
        "num_labels": 1,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }


def read_config(folder: str | Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face folder; raises ModelError where it is missing or damaged."""
    path = Path(folder) / "config.json"
    if not os.path.lexists(path):
        raise ModelError(f"{shown(path)}: no such file; model.path must be a folder in Hugging Face format")
    config = read_model_json(path)
    if not isinstance(config, dict):
        raise ModelError(f"{shown(path)}: must hold a JSON object")
    return config


def _rope(path: Path, config: dict[str, Any]) -> tuple[float, float | None]:
    """(theta, factor of Llama 3's scaling or None), from either spelling that transformers has used."""
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(field), dict | None):
            raise ModelError(f"{shown(path)}: {field} must be an object; it is {brief(config[field])}")
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # as transformers chooses
    given: dict[str, Any] = {key: value for key, value in (config.get(field) or {}).items() if value is not None}
    theta = number(path, "rope_theta", given if "rope_theta" in given else config, 10000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        told = f"{field}.rope_type is {brief(kind)} and type is {brief(given['type'])}"
        raise ModelError(f"{shown(path)}: {told}, which are one field; remove one")
    if kind not in ("default", "llama3"):
        raise unsupported(path, f"{field}.rope_type", kind, "default, llama3")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise unsupported(path, f"{field}.partial_rotary_factor", given["partial_rotary_factor"], "1.0")
    known = (*_ROPE_FIELDS, *(("factor", *_LLAMA3) if kind == "llama3" else ()))
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ModelError(
            f"{shown(path)}: {field}.{shown(unknown[0], 80)} is {brief(given[unknown[0]])}, which this version does "
            f"not know for rope_type {kind}"
        )
    if kind == "default":
        return theta, None
    factor = number(path, "factor", given)
    for key, value in _LLAMA3.items():
        if isinstance(given.get(key), bool) or given.get(key) != value:
            raise unsupported(path, f"{field}.{key}", given.get(key), str(value))
    return theta, factor


def _experts(path: Path, config: dict[str, Any]) -> Experts:
    """The mixture of a config; raises ModelError where a token would reach more experts than there are."""
    names = [name for name in ("num_local_experts", "num_experts") if config.get(name) is not None] or ["num_experts"]
    counts = {size(path, name, config) for name in names}
    experts = Experts(
        count=max(counts),
        chosen=size(path, "num_experts_per_tok", config),
        feed_forward=size(path, "moe_intermediate_size", config),
        normalized=flag(path, "norm_topk_prob", config),
    )
    if len(counts) > 1:
        raise ModelError(f"{shown(path)}: num_experts and num_local_experts differ, and are one field; remove one")
    if experts.chosen > experts.count:
        raise ModelError(f"{shown(path)}: num_experts_per_tok is {experts.chosen}, of {experts.count} experts")
    return experts


def read_architecture(folder: str | Path) -> Architecture:
    """Reads and checks ``config.json`` in ``folder``; raises ModelError naming the field that is not supported."""
    return parse_architecture(read_config(folder), folder)


def parse_architecture(config: dict[str, Any], folder: str | Path) -> Architecture:
    """The architecture of a Hugging Face ``config``; ``folder`` is where it is from, for errors (see ModelError)."""
    path = Path(folder) / "config.json"
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise unsupported(path, "model_type", kind, ", ".join(sorted(FAMILIES)))
    family = FAMILIES[kind]
    check_fields(path, config, family)
    check_class(path, config, family)
    if kind == "mistral" and "sliding_window" not in config:
        raise ModelError(
            f"{shown(path)}: sliding_window is missing, which means 4096 for mistral and is not supported; "
            'add "sliding_window": null if the model has none'
        )
    theta, factor = _rope(path, config)
    layers, vocabulary = size(path, "num_hidden_layers", config), size(path, "vocab_size", config)
    _check_layer_types(path, config, layers)
    heads, key_value_heads, head_dim = _heads(path, config, family)
    token_ids(path, "bos_token_id", config, vocabulary)
    pad = token_ids(path, "pad_token_id", config, vocabulary)
    return Architecture(
        family=kind,
        layers=layers,
        hidden=size(path, "hidden_size", config),
        feed_forward=size(path, "intermediate_size", config),
        heads=heads,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        max_positions=size(path, "max_position_embeddings", config, family.positions),
        norm_epsilon=number(path, "rms_norm_eps", config, 1e-6),
        rope_theta=theta,
        rope_scaling_factor=factor,
        tied_embeddings=flag(path, "tie_word_embeddings", config),
        query_key_norm=family.query_key_norm,
        qkv_bias=family.qkv_bias,
        pad_token_id=pad[0] if pad else None,
        end_token_ids=token_ids(path, "eos_token_id", config, vocabulary),
        experts=_experts(path, config) if family.experts else None,
    )


def _check_layer_types(path: Path, config: dict[str, Any], layers: int) -> None:
    types = config.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        told = sorted(set(map(str, types))) if isinstance(types, list) else types
        raise unsupported(path, "layer_types", told, "full_attention in every layer")
    if len(types) != layers:
        raise ModelError(f"{shown(path)}: layer_types has {len(types)} layers, and num_hidden_layers is {layers}")


def _heads(path: Path, config: dict[str, Any], family: Family) -> tuple[int, int, int]:
    """(query heads, key-value heads, size of a head) of a config; raises ModelError where they do not go together."""
    heads, hidden = size(path, "num_attention_heads", config), size(path, "hidden_size", config)
    derived = {"num_key_value_heads": heads, "head_dim": hidden // heads}
    for field, default in family.absent:
        if field not in config and default != derived[field]:
            raise ModelError(f"{shown(path)}: {field} is missing; add it (transformers would take {default})")
    key_value_heads = size(path, "num_key_value_heads", config, heads)
    if heads % key_value_heads:
        raise ModelError(
            f"{shown(path)}: num_attention_heads is {heads}, no multiple of num_key_value_heads, {key_value_heads}"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise ModelError(
            f"{shown(path)}: hidden_size is {hidden}, no multiple of num_attention_heads, {heads}; head_dim is missing"
        )
    head_dim = size(path, "head_dim", config, hidden // heads)
    if head_dim % 2:
        raise ModelError(f"{shown(path)}: head_dim is {head_dim}; it must be even, since positions turn pairs")
    return heads, key_value_heads, head_dim


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
