"""Decoders with gated attention in some layers, delta nets in the others, and zero-centred norms: Qwen3-Next's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_megatron.models.config_fields import size, unsupported
from rlhf_megatron.models.description import Architecture, LayerKind, SharedExpert
from rlhf_megatron.models.families import delta_net_tensors
from rlhf_megatron.models.families.decoder import NO_ATTENTION_BIAS, Decoder
from rlhf_megatron.models.families.qwen2_moe import dense_layers

_GATE = "output_gate_type"  # of a delta net's output
FIELDS = delta_net_tensors.FIELDS | {_GATE, "partial_rotary_factor"}
NEVER_NULL = (*delta_net_tensors.NEVER_NULL, "head_dim", "num_key_value_heads")
# vLLM alone reads attn_output_gate.
ONLY = NO_ATTENTION_BIAS | {"attn_output_gate": True, "use_sliding_window": False}
# What transformers takes for absent fields, where other decoders have something else.
_ABSENT = {"norm_topk_prob": True, "partial_rotary_factor": 0.25}


@dataclasses.dataclass(frozen=True)
class DeltaDecoder(Decoder):
    """The usual decoder, of whose layers some have a delta net, and some perhaps no experts.

    ``by_key_head``: see ``DeltaNet``. ``vllm_ties_embeddings``: to the output layer, where the config says so.
    """

    by_key_head: bool = False
    vllm_ties_embeddings: bool = True
    query_key_norm: bool = True
    partial_rotary: bool = True
    zero_centred_norms: bool = True
    initial_values: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {delta_net_tensors.OUTPUT_NORM: 1.0}
    )
    has_rollout_table: bool = False

    def read(self, path: Path, config: Mapping[str, Any]) -> Architecture:
        """See Family."""
        config = _ABSENT | dict(config)
        if config.get(_GATE, "silu") not in ("silu", "swish"):  # two names of what transformers has in any case
            raise unsupported(path, _GATE, config[_GATE], "silu, swish")
        # The names of layer types are other ones than those of windows.
        plain = super().read(path, {field: value for field, value in config.items() if field != "layer_types"})
        has_delta = delta_net_tensors.delta_layers(path, config, plain.layers)
        dense, experts = set(range(plain.layers)), plain.experts
        if experts is not None:
            dense = dense_layers(path, config, plain.layers)
            shared = SharedExpert(size(path, "shared_expert_intermediate_size", config), gated=True)
            experts = dataclasses.replace(experts, shared=shared)
        kinds = tuple(
            LayerKind("delta" if delta else "full", "dense" if layer in dense else "experts")
            for layer, delta in enumerate(has_delta)
        )
        net = delta_net_tensors.read_delta_net(path, config, by_key_head=self.by_key_head) if any(has_delta) else None
        return dataclasses.replace(
            plain,
            experts=experts,
            mixed_layers=kinds if len(set(kinds)) > 1 or any(has_delta) else (),
            gated_attention=True,
            delta_net=net,
        )

    def rollout_problem(self, architecture: Architecture) -> str | None:
        """See Family."""
        if architecture.tied_embeddings and not self.vllm_ties_embeddings:
            return f"tie_word_embeddings is true, and vLLM gives {architecture.family} an output layer of its own"
        return super().rollout_problem(architecture)
