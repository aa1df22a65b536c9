"""Attention on GPUs with soft caps and sinks, in memory that grows with the tokens and not with their square.

By torch's FlexAttention (arXiv 2412.05496), compiled: Transformer Engine has no soft caps, and sinks with few of its
kernels. Every query attends to an interval of the packed keys: those of its sequence, up to itself, within the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rlhf_megatron.compat.torch import with_constant_floats

BLOCK = 128  # queries and keys of a block, which is skipped where no query attends to a key


def can_attend(query: Tensor) -> bool:
    """Return whether it is for such queries: on GPUs, and not in float32, whose blocks are too large for them."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def interval_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: tuple[Tensor, Tensor],
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Map query [q, heads, d], key and value [t, kv_heads, d] -> [q, heads, d]; compiled on GPUs alone.

    ``attended``: see ``intervals``. ``soft_cap`` and ``sinks``: see ``causal_attention``.
    """
    low, high = attended
    attend: Any = _compiled() if query.is_cuda else flex_attention
    out, aux = attend(
        *(_padded(packed).transpose(0, 1)[None] for packed in (query, key, value)),
        score_mod=None if soft_cap is None else _capped(soft_cap),
        block_mask=interval_mask(low, high, len(key)),
        scale=scale,
        enable_gqa=query.size(1) != key.size(1),
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:  # one more key, without a value: exp(lse) / (exp(lse) + exp(sink)) of the softmax is left
        left = torch.sigmoid(aux.lse.float() - sinks.float()[None, :, None])
        out = (out * left[..., None]).to(value.dtype)
    of_queries: Tensor = out[0].transpose(0, 1)[: len(query)]
    return of_queries


def intervals(boundaries: Tensor, window: int | None, query_positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the first and the last key of each query, among the packed ones of sequences by ``boundaries``."""
    lengths = boundaries.diff().long()
    start = boundaries[:-1].long().repeat_interleave(lengths)
    high = torch.arange(len(start), device=start.device) if query_positions is None else query_positions
    low = start[high]
    return (low if window is None else torch.maximum(low, high - window + 1)), high


def interval_mask(low: Tensor, high: Tensor, keys: int) -> BlockMask:
    """Return the mask of queries that attend to the keys from ``low`` to ``high``; what pads them, as the last does."""
    padding = -len(low) % BLOCK
    low, high = (torch.cat([bound, bound[-1:].expand(padding)]) for bound in (low, high))
    first = BLOCK * torch.arange(-(-keys // BLOCK), device=low.device)
    by_block = low.view(-1, BLOCK), high.view(-1, BLOCK)
    (least_low, most_low), (least_high, most_high) = (bound.aminmax(dim=1) for bound in by_block)
    reached = (first + BLOCK > least_low[:, None]) & (first <= most_high[:, None])
    whole = (first >= most_low[:, None]) & (first + BLOCK - 1 <= least_high[:, None])

    def inside(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= low[query]) & (key <= high[query])

    return BlockMask.from_kv_blocks(
        *_listed(reached & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=inside,
        seq_lengths=(len(low), len(first) * BLOCK),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Map [queries, keys] -> how many blocks of keys each of queries has, and which, first those; of one batch and
    head."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _padded(packed: Tensor) -> Tensor:
    """Return [t, heads, d] with zeros behind, up to whole blocks."""
    return functional.pad(packed, (0, 0, 0, 0, 0, -len(packed) % BLOCK))


@functools.cache
def _compiled() -> Callable[..., Any]:
    # Lengths differ from micro-batch to micro-batch; a part that is not compiled would make all products at once.
    # A soft cap is a constant of its kernel: torch 2.11 cannot trace one that is an input.
    return with_constant_floats(torch.compile(flex_attention, dynamic=True, fullgraph=True))


@functools.cache
def _capped(soft_cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return soft_cap * torch.tanh(score / soft_cap)

    return capped
