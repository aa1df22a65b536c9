"""Attention to a prefix that several rows share: its keys and values are repeated before those of each row.

One call of any attention over packed sequences does it, whose causal mask ends at the last key of each sequence.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.shared_prompts import RepeatedKeys


class Mask(enum.Enum):
    """Transformer Engine's name of the mask, which Megatron's enumeration lacks and passes on by its ``name``."""

    padding_causal_bottom_right = "the last query of a sequence is at its last key"


def install_shared_prompts(chunks: Sequence[torch.nn.Module]) -> None:
    """Have attention in this rank's ``chunks`` repeat keys and values as ``PackedSequences`` say."""
    for chunk in chunks:
        for module in chunk.modules():
            attention = getattr(module, "core_attention", None)
            if attention is not None:
                attention.register_forward_pre_hook(_repeat, with_kwargs=True)


def _repeat(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    keys = getattr(named.get("packed_seq_params"), "repeated", None)
    if keys is None:
        return None
    query, key, value, *rest = given
    repeated = query, repeat(key, keys), repeat(value, keys), *rest
    return repeated, named | {"attn_mask_type": Mask.padding_causal_bottom_right}


def repeat(values: Tensor, keys: RepeatedKeys) -> Tensor:
    """Map [t, heads, d] -> [k, heads, d]: those of all sequences; gradients are summed in float32, in one order."""
    repeated: Tensor = _Repeated.apply(values, keys)  # type: ignore[no-untyped-call]
    return repeated


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, keys: RepeatedKeys) -> Tensor:
        ctx.keys = keys
        return values.index_select(0, keys.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        keys = ctx.keys
        sums = gradient.index_select(0, keys.first).to(torch.promote_types(gradient.dtype, torch.float32))
        for token, count, copy in keys.copies:
            sums[token : token + count] += gradient[copy : copy + count]
        return sums.to(gradient.dtype), None
