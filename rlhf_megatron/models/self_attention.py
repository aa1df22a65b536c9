"""Megatron's self-attention with vLLM's order inside the fused matrix, so that both can read the same memory."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class StackedSelfAttention(SelfAttention):
    """All queries of a rank, then its keys, then its values; Megatron's own interleaves them by group.

    With fewer key-value heads than tensor ranks Megatron cuts through groups, and that stays as it is
    (see ``weight_map``).
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **options: Any
    ) -> Any:
        """hidden_states [s, b, hidden] -> query [s, b, heads, d], key and value [s, b, kv_heads, d] of this rank."""
        if self.config.num_query_groups < self.world_size:
            return super().get_query_key_value_tensors(hidden_states, key_value_states, **options)
        fused, _ = self.linear_qkv(hidden_states)
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        of_heads = fused.unflatten(-1, (-1, self.hidden_size_per_attention_head))
        query, key, value = of_heads.split([heads, groups, groups], dim=-2)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        # Rotary embeddings make queries and keys anew. A value that is a view would keep all of ``fused`` for the
        # backward pass, and of a single token it counts as contiguous wherever it begins, which Transformer Engine
        # refuses.
        return query, key, value.clone(memory_format=torch.contiguous_format)
