"""A decoder layer of Megatron's whose sublayers' outputs are normed or scaled before they join the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rlhf_megatron.models.description import Scales
from rlhf_megatron.models.rectangles import Implementation


class SublayerOutput(torch.nn.Module):
    """Sum of residual and a sublayer's output: residual + scale x norm(output + bias), without dropout.

    In place of Megatron's ``self_attn_bda`` and ``mlp_bda``, and called as these are.
    """

    def __init__(self, norm: torch.nn.Module | None, scale: float) -> None:
        super().__init__()
        self.norm, self._scale = norm, scale

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """Return the function that adds."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        output = output if bias is None else output + bias
        output = output if self.norm is None else self.norm(output)
        return residual + (output if self._scale == 1.0 else output * self._scale)


class DecoderLayer(TransformerLayer):
    """Megatron's layer with another end of attention and feed-forward layer.

    ``output_norm`` makes a norm behind each, None: there is none. ``residual_scale`` is what their outputs are
    multiplied with. ``has_scalar``: what the layer makes is multiplied with a number that is not trained.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        output_norm: Callable[..., Any] | None,
        residual_scale: float,
        has_scalar: bool,
        **options: Any,
    ) -> None:
        super().__init__(config, *args, **options)

        def output() -> SublayerOutput:
            norm = output_norm and output_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )
            return SublayerOutput(norm, residual_scale)

        self.self_attn_bda, self.mlp_bda = output(), output()
        self.layer_scalar: torch.nn.Parameter | None = None
        if has_scalar:
            # A parameter, though without a gradient, so that it is loaded, regathered, saved and exported as any other.
            device = torch.device("cpu" if config.use_cpu_initialization else "cuda")
            one = torch.ones(1, dtype=config.params_dtype, device=device)
            self.layer_scalar = torch.nn.Parameter(one, requires_grad=False)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Any]:
        """See TransformerLayer."""
        output, context = super().forward(*arguments, **options)
        return output if self.layer_scalar is None else output * self.layer_scalar, context


def remove_norms_before(spec: Any, implementation: Implementation) -> None:
    """Take the norms before attention and feed-forward layer, which is dense, out of Megatron's ``spec`` of a layer."""
    if implementation == "local":
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
        return
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    spec.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    spec.submodules.mlp.keywords["submodules"].linear_fc1 = TEColumnParallelLinear


def scale_embeddings(embedding: torch.nn.Module, scales: Scales) -> None:
    """Have a module's output multiplied with the factor of embeddings."""
    if scales.embedding is None:
        return
    factor, is_rounded = scales.embedding, scales.rounded_embedding

    def after(_: torch.nn.Module, __: Any, output: Tensor) -> Tensor:
        return output * (torch.tensor(factor).to(output.dtype).item() if is_rounded else factor)

    embedding.register_forward_hook(after)


class ParallelLayer(TransformerLayer):
    """A layer whose attention and feed-forward layer read the same norm, and are both added to the residual stream."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Any]:
        """See TransformerLayer: [s, 1, hidden] -> the same, and the context as it is."""
        normed = self.input_layernorm(hidden_states)
        attention, _bias = self.self_attention(
            normed, attention_mask=attention_mask, packed_seq_params=packed_seq_params
        )
        feed_forward, _bias = checkpoint(self.mlp, False, normed) if self.recompute_mlp else self.mlp(normed)
        return hidden_states + attention + feed_forward, context
