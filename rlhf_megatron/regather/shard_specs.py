"""The two ends of a regathering as ``plan`` wants them: the trainer's shards and the rollout's."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.lora import Adaptation, adapter_blocks, adapter_layout, adapter_ranks
from rlhf_megatron.models.weight_map import Block, Implementation, megatron_blocks, rollout_blocks
from rlhf_megatron.regather.demand import Shard
from rlhf_megatron.regather.plan import ShardSpec
from rlhf_megatron.topology.layout import Layout


def trainer_shards(
    architecture: Architecture, layout: Layout, ranks: Sequence[int], implementation: Implementation = "local"
) -> ShardSpec:
    """Return the shards of a Megatron role whose positions are the global ``ranks``; data-parallel ranks are one
    shard."""
    shard_of: dict[int, Shard] = {}
    position_of: dict[Shard, int] = {}
    for position, rank in enumerate(ranks):
        coordinates, of_experts = layout.coordinates(position), layout.expert_coordinates(position)
        shard = (coordinates.pipeline, coordinates.tensor, of_experts.tensor, of_experts.expert)
        position_of.setdefault(shard, position)
        shard_of[rank] = shard
    return ShardSpec(shard_of, lambda shard: megatron_blocks(architecture, layout, position_of[shard], implementation))


def adapter_shards(
    architecture: Architecture, adaptation: Adaptation, layout: Layout, ranks: Sequence[int]
) -> ShardSpec:
    """Return the shards of the adapters of a Megatron role in ``layout``: of each pipeline stage one for each part of
    the experts."""
    flat = adapter_layout(layout)
    shard_of: dict[int, Shard] = {}
    position_of: dict[Shard, int] = {}
    for position, rank in enumerate(adapter_ranks(layout, ranks)):
        at = flat.expert_coordinates(position)
        shard_of[rank] = (at.pipeline, at.expert)
        position_of.setdefault((at.pipeline, at.expert), position)
    return ShardSpec(shard_of, lambda shard: adapter_blocks(architecture, adaptation, flat, position_of[shard]))


def rollout_shards(
    architecture: Architecture,
    tensor: int,
    ranks: Sequence[int],
    expert_parallel: bool = False,
    learned: Sequence[Sequence[Block]] | None = None,
) -> ShardSpec:
    """Return the shards of vLLM's replicas, of ``tensor`` neighbours in ``ranks`` each; a shard is a position in the
    replica.

    ``learned`` are the blocks of each, for a model whose family has no table of them (``learned_rollout``).
    """
    shard_of = {rank: position % tensor for position, rank in enumerate(ranks)}
    if learned is not None:
        return ShardSpec(shard_of, learned.__getitem__)
    return ShardSpec(shard_of, lambda shard: rollout_blocks(architecture, tensor, shard, expert_parallel))


def parameter_shapes(blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that ``blocks`` fill, without what pads a vocabulary."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        ends = [begin + stop - start for begin, (start, stop) in zip(block.offset, block.region, strict=True)]
        known = shapes.get(block.parameter, (0,) * len(ends))
        shapes[block.parameter] = tuple(map(max, known, ends))
    return shapes
