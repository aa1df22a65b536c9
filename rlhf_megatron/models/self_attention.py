"""Megatron's self-attention with vLLM's order inside the fused matrix, so that both can read the same memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from rlhf_megatron.models.rotary import Rotary
from rlhf_megatron.models.wide_norm import HeadNorm, WideNorm


class StackedSelfAttention(SelfAttention):
    """All queries of a rank, then its keys, then its values; Megatron's own interleaves them by group.

    Queries and keys are turned by the layer's own rotary table before Megatron sees them: its model has no position
    embeddings. With fewer key-value heads than tensor ranks Megatron cuts through groups, and that stays as it is
    (see ``rectangles``). ``norm``: of queries and keys, in place of Megatron's.
    ``norms_of_turned``: they are turned, then normed. ``value_norm``: values are normed, without weights.
    ``keys_are_values``: a value is its key before norm and positions. ``key_value_heads``, ``head_dim``: of this layer,
    where layers differ.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        rotary: Rotary,
        norm: type[WideNorm | HeadNorm] | None = None,
        norms_of_turned: bool = False,
        value_norm: bool = False,
        keys_are_values: bool = False,
        key_value_heads: int,
        head_dim: int,
        **options: Any,
    ) -> None:
        if (config.num_query_groups, config.kv_channels) != (key_value_heads, head_dim):
            config = copy.copy(config)
            config.num_query_groups, config.kv_channels = key_value_heads, head_dim
        super().__init__(config, *args, **options)
        if norm is not None:
            self.q_layernorm = norm(config, self.num_attention_heads_per_partition, self.pg_collection.tp)
            self.k_layernorm = norm(config, self.num_query_groups_per_partition, self.pg_collection.tp)
        if norms_of_turned:  # Megatron norms in more places than one
            for module in (self.q_layernorm, self.k_layernorm):
                module.register_forward_pre_hook(lambda _, inputs: (self._rotated(inputs[0]),))
        self._rotary, self._norms_of_turned = rotary, norms_of_turned
        self._norms_values, self._keys_are_values = value_norm, keys_are_values
        self._packed: Any = None  # Megatron's PackedSeqParams, while in forward

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        """See SelfAttention; packed sequences only."""
        if packed_seq_params is None:
            raise ValueError("StackedSelfAttention takes packed sequences only; pass packed_seq_params")
        self._packed = packed_seq_params
        try:
            return super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **options)
        finally:
            self._packed = None

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **options: Any
    ) -> Any:
        """Map hidden_states [s, 1, hidden] -> query [s, 1, heads, d], key and value [s, 1, kv_heads, d] of this rank.

        With gated attention the gates come last, [s, 1, heads, d]; in the matrix each is behind its query.
        """
        if self.config.num_query_groups < self.world_size:
            query, key, value = super().get_query_key_value_tensors(hidden_states, key_value_states, **options)
            return self._turned(query), self._turned(key), self._normed(value)
        fused, _ = self.linear_qkv(hidden_states)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        of_heads = fused.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        gated: bool = self.config.attention_output_gate
        query, key, *own = of_heads.split(
            [heads * (1 + gated), *[groups] * (1 if self._keys_are_values else 2)], dim=-2
        )
        [value] = own or [key]
        gate = []
        if gated:
            query, of_output = query.unflatten(-2, (heads, 2)).unbind(-2)
            gate = [of_output]
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        # Queries and keys are made anew. A value that is a view would keep all of ``fused`` for the backward pass, and
        # of a single token it counts as contiguous wherever it begins, which Transformer Engine refuses.
        value = self._normed(value) if self._norms_values else value.clone(memory_format=torch.contiguous_format)
        return self._turned(query), self._turned(key), value, *gate

    def _normed(self, values: Tensor) -> Tensor:
        """Return values, normed if they are: in float32, as transformers and vLLM do."""
        if not self._norms_values:
            return values
        size, epsilon = values.shape[-1:], self.config.layernorm_epsilon
        return functional.rms_norm(values.float(), size, eps=epsilon).to(values.dtype)

    def _turned(self, values: Tensor) -> Tensor:
        """Return queries or keys, normed if they are, with their positions."""
        return values if self._norms_of_turned else self._rotated(values)

    def _rotated(self, values: Tensor) -> Tensor:
        group = self.pg_collection.cp
        return self._rotary.turn(values.squeeze(1), self.layer_number - 1, self._packed, group).unsqueeze(1)


def with_fewer_rows(linear: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Return a builder of a linear layer of Megatron's or Transformer Engine's with so many ``rows`` fewer."""

    def build(inputs: int, outputs: int, **options: Any) -> Any:
        return linear(inputs, outputs - rows, **options)

    return build


def with_columns(linear: Callable[..., Any], columns: int) -> Callable[..., Any]:
    """Return a builder of a linear layer of Megatron's or Transformer Engine's with inputs of so many ``columns``."""

    def build(inputs: int, outputs: int, **options: Any) -> Any:
        return linear(columns, outputs, **options)

    return build
