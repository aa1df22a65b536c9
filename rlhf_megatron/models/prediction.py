"""The input of a layer for multi-token prediction: a model's output at a token and the embedding of the next, as one.

As in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2) and vLLM.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PredictionInput(torch.nn.Module):
    """Norms of both, and their product with one matrix; takes the place of ``GPTModel.embedding``.

    Every tensor-parallel rank has all of it. With sequence parallelism each has its own tokens, and Megatron sums the
    gradients of what is marked ``sequence_parallel``.
    """

    def __init__(self, config: TransformerConfig) -> None:
        """Set up; the weights are not yet filled in."""
        super().__init__()
        hidden, kind = config.hidden_size, config.params_dtype
        self.enorm = torch.nn.RMSNorm(hidden, config.layernorm_epsilon, dtype=kind)
        self.hnorm = torch.nn.RMSNorm(hidden, config.layernorm_epsilon, dtype=kind)
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False, dtype=kind)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Map embeddings [t, 1, hidden] of the next tokens, and the model's output there [t, 1, hidden], to the layer's
        input of the same shape."""
        return self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))  # type: ignore[no-any-return]
