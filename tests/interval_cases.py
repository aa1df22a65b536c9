"""Packed sequences with caps, sinks and windows, for attention by intervals and the explicit one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_megatron.data.context_parallel import tokens_of_part
from rlhf_megatron.models.attention import Queries, causal_attention
from rlhf_megatron.models.interval_attention import interval_attention, intervals

LENGTHS = [40, 8, 520, 256, 16]
CASES: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True},
    "a soft cap": {"soft_cap": 1.5},
    "both, in a window": {"sinks": True, "soft_cap": 2.0, "window": 100},
    "sinks, wide window": {"sinks": True, "window": 128},
    "a soft cap, heads of 256": {"soft_cap": 1.5, "head_dim": 256},
    "sinks, the second of two ranks": {"sinks": True, "window": 90, "parts": 2},
}


class Inputs(NamedTuple):
    """Packed queries, keys, values and sinks, sequences, and the arguments of both attentions."""

    tensors: list[Tensor]
    boundaries: Tensor
    arguments: dict[str, Any]


def inputs(name: str, device: str, dtype: torch.dtype, lengths: list[int] | None = None) -> Inputs:
    """Return those of a case, four heads on two of keys and values."""
    case = {"head_dim": 64, "parts": 1, "sinks": False, "window": None, "soft_cap": None} | CASES[name]
    lengths = lengths or LENGTHS
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(device)
    draw, total = torch.Generator().manual_seed(0), sum(lengths)
    positions = None if case["parts"] == 1 else tokens_of_part(boundaries, 2, 1)
    queries = total if positions is None else len(positions)
    shapes = [(queries, 4, case["head_dim"]), (total, 2, case["head_dim"]), (total, 2, case["head_dim"])]
    shapes += [(4,)] * case["sinks"]
    tensors = [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]
    queries_of = None if positions is None else Queries(positions, boundaries // 2)
    arguments = {"window": case["window"], "soft_cap": case["soft_cap"], "queries": queries_of}
    return Inputs(tensors, boundaries, arguments)


def interval(given: Inputs) -> Tensor:
    """Return the attention by intervals."""
    query, key, value, *sinks = given.tensors
    of_rank = given.arguments["queries"]
    attended = intervals(given.boundaries, given.arguments["window"], of_rank and of_rank.positions)
    soft_cap, scale = given.arguments["soft_cap"], query.size(-1) ** -0.5
    return interval_attention(query, key, value, attended, scale, soft_cap, sinks[0] if sinks else None)


def explicit(given: Inputs) -> Tensor:
    """Return the same with all products at once, in float32."""
    query, key, value, *sinks = (each.float() for each in given.tensors)
    longest, scale = int(given.boundaries.diff().max()), query.size(-1) ** -0.5
    return causal_attention(
        query, key, value, given.boundaries, longest, scale=scale, sinks=sinks[0] if sinks else None, **given.arguments
    )
