"""Gated delta nets (arXiv 2412.06464) over packed rows: linear attention in place of softmax attention.

On GPUs flash-linear-attention computes them where it is installed and right; elsewhere, in float32 and where the same
bits are asked for, plain torch does. Megatron's own module needs it, and another order of rows in its matrices.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from packaging.version import Version
from torch import Tensor

from rlhf_megatron.kernels.rotary import positions
from rlhf_megatron.models.delta_rule import delta_rule
from rlhf_megatron.models.description import DeltaNet
from rlhf_megatron.models.head_exchange import heads_for_tokens, permuted, tokens_for_heads
from rlhf_megatron.models.packed_sequences import PackedSequences
from rlhf_megatron.models.rectangles import Implementation


def use_delta_net(net: DeltaNet, spec: Any, implementation: Implementation) -> None:
    """Put a delta net in the place of attention in Megatron's spec of a layer."""
    column: Callable[..., Any]
    row: Callable[..., Any]
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

        spec.submodules.input_layernorm, column, row = TENorm, TEColumnParallelLinear, TERowParallelLinear
    else:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        column, row = ColumnParallelLinear, RowParallelLinear
    parts = {"net": net, "column": column, "row": row}
    spec.submodules.self_attention = ModuleSpec(module=DeltaNetAttention, params=parts)


class DeltaNetAttention(MegatronModule):
    """One rank's heads of a gated delta net; takes the place of ``self_attention`` in a layer.

    ``column`` and ``row`` are Megatron's linear layers. With several tensor ranks sequence parallelism is on: each rank
    has a part of the gradient of the output's norm, which Megatron sums then.

    With context parallelism ranks exchange tokens for heads between the projections: each has some of the heads of all
    tokens there, and only these heads' numbers of ``conv1d``, ``dt_bias`` and ``A_log`` get gradients from it.
    """

    def __init__(
        self,
        config: Any,
        *_: Any,
        net: DeltaNet,
        column: Callable[..., Any],
        row: Callable[..., Any],
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        ranks = pg_collection.tp.size()
        assert ranks == 1 or config.sequence_parallel
        self._context: dist.ProcessGroup = pg_collection.cp
        self._net, self._keys, self._values = net, net.keys // ranks, net.values // ranks
        self._key_heads, heads = net.key_heads // ranks, net.value_heads // ranks
        make = functools.partial(
            column,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=pg_collection.tp,
        )
        self.in_proj_qkvz = make(2 * net.keys + 2 * net.values)
        self.in_proj_ba = make(2 * net.value_heads)
        channels = 2 * self._keys + self._values
        self.conv1d = torch.nn.Conv1d(channels, channels, net.taps, groups=channels, bias=False)
        self.dt_bias = torch.nn.Parameter(torch.ones(heads))
        self.A_log = torch.nn.Parameter(torch.zeros(heads))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
            parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]
        self._epsilon: float = config.layernorm_epsilon
        self.out_norm = torch.nn.RMSNorm(net.value_dim, config.layernorm_epsilon)
        self.out_norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.out_proj = row(
            net.values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=pg_collection.tp,
        )

    def forward(self, hidden_states: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Any:
        """Map hidden_states [s, 1, hidden] -> the same of what is added to them, and no bias; packed sequences only."""
        if packed_seq_params is None:
            raise ValueError("DeltaNetAttention takes packed sequences only; pass packed_seq_params")
        qkvz, ba = (layer(hidden_states)[0].squeeze(1) for layer in (self.in_proj_qkvz, self.in_proj_ba))
        *mixing, gate, beta, alpha = self._parted(qkvz, ba)
        mixed, beta, alpha = self._heads_for_tokens(mixing, beta, alpha, packed_seq_params)
        convolve, apply_rule = self._kernels(qkvz)
        sizes = [self._keys, self._keys, self._values]
        mixed = convolve(mixed, self._of_rank(self.conv1d.weight.squeeze(1), *sizes), packed_seq_params)
        query, key, value = mixed.split([size // self._context.size() for size in sizes], dim=-1)
        repeats = self._net.value_heads // self._net.key_heads
        query, key = (
            normalised(part.unflatten(-1, (-1, self._net.key_dim))).repeat_interleave(repeats, dim=1)
            for part in (query, key)
        )
        decay = -self._of_rank(self.A_log).float().exp() * functional.softplus(
            alpha.float() + self._of_rank(self.dt_bias)
        )
        value = value.unflatten(-1, (-1, self._net.value_dim))
        out = apply_rule(query, key, value, decay, beta.sigmoid(), packed_seq_params)
        out = self._tokens_for_heads(out, packed_seq_params)
        return self.out_proj(self._gated(out, gate.unflatten(-1, (-1, self._net.value_dim))).flatten(1)[:, None])

    def _heads_for_tokens(
        self, mixing: Sequence[Tensor], beta: Tensor, alpha: Tensor, rows: PackedSequences
    ) -> list[Tensor]:
        """Map [t, n] each, of all heads -> [t of all ranks, n of this rank's heads], ``mixing`` behind each other."""
        parts = self._context.size()
        if parts == 1:
            return [torch.cat([*mixing], dim=-1), beta, alpha]
        by_rank = [each.unflatten(-1, (parts, -1)) for each in (*mixing, beta, alpha)]
        received = heads_for_tokens(torch.cat(by_rank, dim=-1), self._context)
        heads = beta.size(-1) // parts
        widths = [received.size(-1) - 2 * heads, heads, heads]
        return [permuted(each, rows.order, rows.held) for each in received.split(widths, dim=-1)]

    def _tokens_for_heads(self, out: Tensor, rows: PackedSequences) -> Tensor:
        """Map [t of all ranks, heads of this one, d] -> [t, heads, d]."""
        if self._context.size() == 1:
            return out
        return tokens_for_heads(permuted(out, rows.held, rows.order), self._context).flatten(1, 2)

    def _of_rank(self, parameter: Tensor, *sections: int) -> Tensor:
        """Return what of each of its ``sections`` (default: one) belongs to the heads of this context rank."""
        parts, rank = self._context.size(), self._context.rank()
        if parts == 1:
            return parameter
        return torch.cat([each.chunk(parts)[rank] for each in parameter.split(sections or len(parameter))])

    def _parted(self, qkvz: Tensor, ba: Tensor) -> list[Tensor]:
        """Return queries, keys, values, gates of the output, strengths and decays of the rank's heads, [t, ...]
        each."""
        sizes, heads = [self._keys, self._keys, self._values, self._values], ba.size(-1) // 2
        if not self._net.by_key_head:
            return [*qkvz.split(sizes, dim=-1), *ba.split(heads, dim=-1)]
        by_head = (each.unflatten(-1, (self._key_heads, -1)) for each in (qkvz, ba))
        widths = ([size // self._key_heads for size in sizes], heads // self._key_heads)
        return [
            part.flatten(1) for each, width in zip(by_head, widths, strict=True) for part in each.split(width, dim=-1)
        ]

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Return [t, heads, d]: the output's norm times the gate; the norm's factor is in the type of the weights."""
        variance = out.float().square().mean(-1, keepdim=True)
        normed = self.out_norm.weight * (out.float() * (variance + self._epsilon).rsqrt()).to(out.dtype)
        return (normed * functional.silu(gate.float())).to(out.dtype)

    def _kernels(self, like: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """Return the convolution and the rule for tensors ``like`` these."""
        wanted = like.is_cuda and like.dtype != torch.float32 and not self.config.deterministic_mode
        return _fused_kernels() if wanted and _has_fused_kernels() else (_convolved_rows, _rule_of_rows)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: Megatron's checkpoints are not written."""
        raise NotImplementedError


def _convolved_rows(values: Tensor, weight: Tensor, rows: PackedSequences) -> Tensor:
    return convolved(values, weight, rows.boundaries)


def _rule_of_rows(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, rows: PackedSequences
) -> Tensor:
    return delta_rule(query, key, value, decay, beta, rows.chunks)


def normalised(values: Tensor) -> Tensor:
    """Return vectors of length 1 along the last dimension, by float32: gradients of short ones go beyond float16."""
    wide = values.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(values.dtype)


def convolved(values: Tensor, weight: Tensor, boundaries: Tensor) -> Tensor:
    """Map values [t, channels], weight [channels, taps] -> silu of each channel's causal convolution, row by row."""
    position = positions(boundaries, len(values))[:, None]
    out = values * weight[:, -1]
    for back in range(1, min(weight.size(1), len(values))):
        earlier = functional.pad(values, (0, 0, back, 0))[:-back]
        out = out + torch.where(position >= back, earlier, 0.0) * weight[:, -1 - back]
    return functional.silu(out)


@functools.cache
def _has_fused_kernels() -> bool:
    problem = _problem_of_fused_kernels()
    if problem:
        warnings.warn(f"layers with a delta net are computed by plain torch, which is slow: {problem}", stacklevel=2)
    return problem is None


def _problem_of_fused_kernels() -> str | None:
    """Return why flash-linear-attention cannot compute delta nets on this GPU; None where it can."""
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install flash-linear-attention)"
    triton, hopper = Version(importlib.metadata.version("triton")), torch.cuda.get_device_capability()[0] == 9
    # https://github.com/fla-org/flash-linear-attention/issues/640; it refuses itself, in the backward pass.
    if hopper and Version("3.4") <= triton < Version("3.7.1") and importlib.util.find_spec("tilelang") is None:
        return f"Triton {triton} computes its gradients wrongly on Hopper; install Triton 3.7.1 or later, or tilelang"
    return None


def _fused_kernels() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the same two of flash-linear-attention, over one batch of packed rows."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def convolve(values: Tensor, weight: Tensor, rows: PackedSequences) -> Tensor:
        out: Tensor = causal_conv1d(
            x=values[None], weight=weight, bias=None, activation="silu", cu_seqlens=rows.boundaries
        )[0]
        return out[0]

    def rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, rows: PackedSequences) -> Tensor:
        packed = (each[None].contiguous() for each in (query, key, value))
        out: Tensor = chunk_gated_delta_rule(*packed, g=decay[None], beta=beta[None], cu_seqlens=rows.boundaries)[0]
        return out[0]

    return convolve, rule
