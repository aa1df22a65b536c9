"""Attention over packed sequences for Megatron's local (pure PyTorch) layers: the CPU's way, and fp32's on any device.

Megatron's own local attention takes no packed sequences; on GPUs Transformer Engine's is used instead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_megatron.models.description import WIDEST_HEAD
from rlhf_megatron.models.head_exchange import heads_for_tokens, permuted, tokens_for_heads
from rlhf_megatron.models.interval_attention import can_attend, interval_attention, intervals


def packed_attention(soft_cap: float | None = None) -> Callable[..., PackedAttention]:
    """Return the maker of a ``PackedAttention`` with this soft cap, for Megatron's specs."""
    return functools.partial(PackedAttention, soft_cap=soft_cap)


class PackedAttention(MegatronModule):
    """Causal attention inside each sequence of a packed micro-batch; takes the place of ``core_attention``.

    In a layer with a window a token attends to itself and to ``config.window_size[0]`` tokens before it.
    ``soft_cap``: see ``Scales``.

    With context parallelism each rank holds a part of each sequence (``data.context``). Either the ranks exchange heads
    for tokens (``cp_comm_type`` a2a, known as Ulysses, arXiv 2309.14509): each then has some heads of all tokens. Or
    each gathers the keys and values of all; a ring (p2p) of Transformer Engine's computes the same.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *_: Any,
        soft_cap: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self._group: dist.ProcessGroup = pg_collection.cp
        self._exchanges_heads = cp_comm_type == "a2a"
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        window = config.window_size[0] + 1 if windowed else None
        self._attend = functools.partial(causal_attention, scale=self.scale, window=window, soft_cap=soft_cap)
        self.softmax_offset: torch.nn.Parameter | None = None  # Megatron's and Transformer Engine's name of sinks
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

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
        """Map query [t, heads, d], key and value [t, kv_heads, d] -> [t, heads * d], sequences by ``cu_seqlens_kv``.

        ``packed_seq_params`` are ``PackedSequences`` where ranks share rows.
        """
        if packed_seq_params is None:
            raise ValueError("PackedAttention takes packed sequences only; pass packed_seq_params")
        boundaries, longest = packed_seq_params.cu_seqlens_kv, int(packed_seq_params.max_seqlen_kv)
        parts = self._group.size()
        if parts == 1:
            of_queries = packed_seq_params.cu_seqlens_q
            at_end = None if of_queries is boundaries else Queries.at_end(of_queries, boundaries)
            return self._attend(query, key, value, boundaries, longest, at_end, sinks=self.softmax_offset).flatten(1)
        held, order = packed_seq_params.held, packed_seq_params.order
        if self._exchanges_heads:
            query, key, value = (
                permuted(heads_for_tokens(part.unflatten(1, (parts, -1)), self._group), order, held)
                for part in (query, key, value)
            )
            offset = self.softmax_offset
            own = None if offset is None else offset.chunk(parts)[self._group.rank()]
            out = self._attend(query, key, value, boundaries, longest, sinks=own)
            return tokens_for_heads(permuted(out, held, order), self._group).flatten(1)
        key, value = (gather_from_sequence_parallel_region(part, group=self._group)[order] for part in (key, value))
        mine = Queries(held.chunk(parts)[self._group.rank()], boundaries // parts)
        return self._attend(query, key, value, boundaries, longest, mine, sinks=self.softmax_offset).flatten(1)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return nothing: checkpoints go by the weight map."""
        return {}


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries [q] of packed sequences that are fewer than their keys.

    Attributes:
        positions: [q] int64: of which of the keys' tokens each is.
        boundaries: [rows + 1]: of the queries of each sequence.
    """

    positions: Tensor
    boundaries: Tensor

    @classmethod
    def at_end(cls, boundaries: Tensor, of_keys: Tensor) -> Queries:
        """Return the last tokens of sequences by ``of_keys``."""
        more = (of_keys - boundaries)[1:].long().repeat_interleave(boundaries.diff().long())
        return cls(torch.arange(len(more), device=more.device) + more, boundaries)


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    longest: int,
    queries: Queries | None = None,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Map query [q, heads, d], key and value [t, kv_heads, d] -> [q, heads, d]; sequences by ``boundaries`` [rows + 1].

    ``queries``: None where every token has one. ``window``: how many tokens a token attends to, itself included; None:
    all before it. ``soft_cap``: of the scaled products of queries and keys. ``sinks`` [heads]: see
    ``Architecture.attention_sinks``.

    Sequences are padded on the right to the longest one: with a causal mask no real token sees the padding, so one call
    serves the whole micro-batch.
    """
    if (soft_cap is not None or sinks is not None) and can_attend(query):
        attended = intervals(boundaries, window, None if queries is None else queries.positions)
        return interval_attention(query, key, value, attended, scale, soft_cap, sinks)
    lengths = boundaries.diff().long()

    def real(counts: Tensor, most: int) -> Tensor:  # [rows, most]
        return torch.arange(most, device=query.device)[None] < counts[:, None]

    def padded(packed: Tensor, filled: Tensor) -> Tensor:  # [n, ...] -> [rows, most, ...]
        out = packed.new_zeros(*filled.shape, *packed.shape[1:])
        out[filled] = packed
        return out

    of_keys = real(lengths, longest)
    of_queries, mask = of_keys, None
    token = torch.arange(longest, device=query.device)
    position = token[None]
    if queries is not None:
        counts = queries.boundaries.diff().long()
        of_queries = real(counts, int(counts.max()))
        position = padded(queries.positions - boundaries[:-1].long().repeat_interleave(counts), of_queries)
    windowed = window is not None and window < longest
    if queries is not None or windowed:  # one mask for all rows where every token has a query
        mask = token <= position[..., None]
        if window is not None and windowed:
            mask &= token > position[..., None] - window
        mask = mask[:, None]
    rows = [padded(query, of_queries), padded(key, of_keys), padded(value, of_keys)]
    query, key, value = (packed.transpose(1, 2) for packed in rows)
    if soft_cap is not None or sinks is not None:
        mask = (token <= position[..., None])[:, None] if mask is None else mask
        out = _explicit_attention(query, key, value, mask, scale, soft_cap, sinks)
    else:
        shared_by = query.size(1) // key.size(1)
        if shared_by > 1 and query.size(-1) > WIDEST_HEAD:
            # torch's one fused kernel for such heads takes as many keys as queries; else all products exist at once.
            key, value, shared_by = *(part.repeat_interleave(shared_by, dim=1) for part in (key, value)), 1
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared_by > 1
        )
    return out.transpose(1, 2)[of_queries]


def _explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return attention of [rows, heads, n, d] with what torch's fused one has not, on CPUs and in float32: all products
    exist at once."""
    grouped = query.unflatten(1, (key.size(1), -1))  # [rows, groups, heads of a group, q, d]
    scores = ((grouped * scale) @ key[:, :, None].transpose(-1, -2)).float()
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        of_heads = sinks.float().view(key.size(1), -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, of_heads], dim=-1)
    weights = scores.softmax(-1)[..., : key.size(-2)].to(value.dtype)
    out: Tensor = (weights @ value[:, :, None]).flatten(1, 2)
    return out
