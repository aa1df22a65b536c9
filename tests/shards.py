"""Small models cut into shards by the blocks of the weight map, without Megatron or vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture, Experts
from rlhf_megatron.models.rope import Rope
from rlhf_megatron.models.weight_map import Block, tensor_shapes
from rlhf_megatron.models.weight_source import window


def architecture(
    tied: bool = True, key_value_heads: int = 4, layers: int = 4, vocabulary: int = 200, experts: int = 0
) -> Architecture:
    """Return a small one; with ``experts`` a mixture of so many."""
    return Architecture(
        family="qwen3",
        layers=layers,
        hidden=16,
        feed_forward=24,
        heads=8,
        key_value_heads=key_value_heads,
        head_dim=4,
        vocabulary=vocabulary,
        max_positions=64,
        norm_epsilon=1e-6,
        rope=Rope(1e4),
        tied_embeddings=tied,
        query_key_norm=True,
        qkv_bias=True,
        experts=Experts(experts, 2, 8, True) if experts else None,
    )


def checkpoint(a: Architecture, seed: int = 0) -> dict[str, Tensor]:
    """Return every tensor of a Hugging Face checkpoint, random."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in tensor_shapes(a).items()}


def filled(blocks: Sequence[Block], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters as large as the blocks say, NaN where no block reaches."""
    sizes: dict[str, list[int]] = {}
    for block in blocks:
        ends = [begin + stop - start for begin, (start, stop) in zip(block.offset, block.region, strict=True)]
        known = sizes.setdefault(block.parameter, ends)
        sizes[block.parameter] = [max(pair) for pair in zip(known, ends, strict=True)]
    parameters = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for block in blocks:
        target = window(parameters[block.parameter], block.offset, block.region)
        assert target.isnan().all(), f"{block} overlaps another block"
        target.copy_(tensors[block.tensor][tuple(slice(*span) for span in block.region)])
    return parameters
