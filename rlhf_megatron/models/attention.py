"""Attention over packed sequences for Megatron's local (pure PyTorch) layers: the CPU's way, and fp32's on any device.

Megatron's own local attention takes no packed sequences; on GPUs Transformer Engine's is used instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence of a packed micro-batch; takes the place of ``core_attention``."""

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *_: Any,
        packed_seq_params: Any = None,
        **__: Any,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, kv_heads, d] -> [T, heads * d], sequences by ``cu_seqlens_q``.

        Sequences are padded on the right to the longest one: with a causal mask no real token sees the padding, so one
        call serves the whole micro-batch without a mask.
        """
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only; pass packed_seq_params")
        boundaries = packed_seq_params.cu_seqlens_q
        lengths = (boundaries[1:] - boundaries[:-1]).long()
        longest = int(packed_seq_params.max_seqlen_q)
        real = torch.arange(longest, device=query.device)[None] < lengths[:, None]  # [rows, longest]

        def padded(packed: Tensor) -> Tensor:  # [T, n, d] -> [rows, n, longest, d]
            out = packed.new_zeros(len(lengths), longest, *packed.shape[1:])
            out[real] = packed
            return out.transpose(1, 2)

        out = functional.scaled_dot_product_attention(
            padded(query),
            padded(key),
            padded(value),
            is_causal=True,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out.transpose(1, 2)[real].reshape(query.size(0), -1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """No weights, so nothing to save."""
        return {}
