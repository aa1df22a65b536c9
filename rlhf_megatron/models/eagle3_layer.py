"""The parts of a head in EAGLE-3's form (https://arxiv.org/abs/2503.01840) that no other model has, as in vLLM."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class FeatureInput(torch.nn.Module):
    """Product that makes one feature of several hidden states of a token; takes the place of ``GPTModel.embedding``.

    Every tensor-parallel rank has all of it. With sequence parallelism each has its own tokens, and Megatron sums the
    gradients of what is marked ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig, states: int) -> None:
        """Set up for so many hidden ``states``; the weights are not yet filled in."""
        super().__init__()
        hidden = config.hidden_size
        self.fc = torch.nn.Linear(states * hidden, hidden, bias=False, dtype=config.params_dtype)
        self.fc.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Tensor:
        """Map hidden states [t, 1, states * hidden], one beside the other, to features [t, 1, hidden]."""
        return self.fc(states)  # type: ignore[no-any-return]


class Eagle3Layer(TransformerLayer):
    """Decoder layer whose attention reads an embedding beside a feature, each with a norm of its own.

    Features are the residual stream.
    """

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        hidden, kind = config.hidden_size, config.params_dtype
        self.embedding_norm = torch.nn.RMSNorm(hidden, config.layernorm_epsilon, dtype=kind)
        self.feature_norm = torch.nn.RMSNorm(hidden, config.layernorm_epsilon, dtype=kind)
        for norm in (self.embedding_norm, self.feature_norm):
            norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Any]:
        """See TransformerLayer: [t, 1, 2 * hidden], embeddings and features -> [t, 1, hidden], and the context."""
        embeddings, features = hidden_states.chunk(2, dim=-1)
        both = torch.cat([self.embedding_norm(embeddings), self.feature_norm(features)], dim=-1)
        attention, _bias = self.self_attention(both, attention_mask=attention_mask, packed_seq_params=packed_seq_params)
        middle = features + attention
        normed = self.pre_mlp_layernorm(middle)
        feed_forward, _bias = checkpoint(self.mlp, False, normed) if self.recompute_mlp else self.mlp(normed)
        return middle + feed_forward, context
