"""Numbers of parameters of one GPU of a rollout, and how many of them can be the actor's memory.

Both are sums over the blocks of vLLM's side of the weight map: a family's table, or what an earlier run has learned.
Layers with equal tensors count as often as there are of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.rectangles import elements, intersect
from rlhf_megatron.models.weight_map import (
    Block,
    has_rollout_table,
    is_expert,
    layer_of,
    megatron_blocks,
    rollout_blocks,
)
from rlhf_megatron.planning.parameters import (
    RankParameters,
    block_shapes,
    dense_and_experts,
    embedding_blocks,
    layer_kinds,
    of_layers,
    rank_parameters,
    sizes_of,
    stage_kinds,
    stage_per_layer,
)
from rlhf_megatron.topology.layout import Layout

_SCALE_BYTES = 4
LearnedBlocks = Sequence[Sequence[Block]]  # of each tensor rank of a replica


@dataclasses.dataclass(frozen=True)
class Replica:
    """The blocks of a vLLM replica of ``tensor`` ranks: ``blocks(rank, layer)``; layer None is what is in no layer."""

    tensor: int
    blocks: Callable[[int, int | None], Sequence[Block]]


class _Part(NamedTuple):
    """Blocks of a rank, and the shapes of the parameters that they fill."""

    blocks: Sequence[Block]
    shapes: Mapping[str, tuple[int, ...]]


def replica_of(
    architecture: Architecture, tensor: int, expert_parallel: bool = False, learned: LearnedBlocks | None = None
) -> Replica | None:
    """Return what a family's table says, or else what was ``learned``; None where neither is known."""
    if has_rollout_table(architecture):
        return _table_replica(architecture, tensor, expert_parallel)
    if learned is None:
        return None
    by_layer: list[dict[int | None, list[Block]]] = [defaultdict(list) for _ in learned]
    for of_rank, blocks in zip(by_layer, learned, strict=True):
        for block in blocks:
            of_rank[layer_of(block.tensor)].append(block)
    return Replica(tensor, lambda rank, layer: by_layer[rank].get(layer, []))


@functools.cache
def _table_replica(architecture: Architecture, tensor: int, expert_parallel: bool) -> Replica:
    return Replica(tensor, functools.partial(_table_blocks, architecture, tensor, expert_parallel))


def _table_blocks(
    architecture: Architecture, tensor: int, expert_parallel: bool, rank: int, layer: int | None
) -> Sequence[Block]:
    blocks = rollout_blocks(architecture, tensor, rank, expert_parallel, [] if layer is None else [layer])
    return [block for block in blocks if layer_of(block.tensor) == layer]


def rollout_parameters(
    architecture: Architecture, tensor: int, expert_parallel: bool = False, replica: Replica | None = None
) -> RankParameters:
    """Return what the fullest of the ``tensor`` ranks of a vLLM replica holds, which is its first.

    Without a ``replica``: what the trainer would hold with the same sharding, which is less where vLLM repeats
    key-value heads.
    """
    if replica is None:
        expert, expert_tensor = (tensor, 1) if expert_parallel else (1, tensor)
        return rank_parameters(architecture, Layout(tensor, expert=expert, expert_tensor=expert_tensor), 0)
    dense = experts = 0
    for layer, count in Counter(layer_kinds(architecture)).items():
        sizes = dense_and_experts(sizes_of(_part_of_rollout(architecture, replica, 0, layer).shapes))
        dense, experts = dense + count * sizes[0], experts + count * sizes[1]
    embeddings = sizes_of(_part_of_rollout(architecture, replica, 0, None).shapes)
    return RankParameters(dense, experts, sum(embeddings.values()))


def quantized_bytes(
    architecture: Architecture, tensor: int, expert_parallel: bool = False, replica: Replica | None = None
) -> int:
    """Return the bytes of a rollout's copies in 8 bits, of linear layers and experts, on the same rank: one for each
    number, and four for each row's scale where the ``replica`` is known."""
    if replica is None:
        held = rollout_parameters(architecture, tensor, expert_parallel)
        return held.dense + held.experts
    return sum(
        count * math.prod(shape[:-1]) * (shape[-1] + _SCALE_BYTES)
        for layer, count in Counter(layer_kinds(architecture)).items()
        for shape in _part_of_rollout(architecture, replica, 0, layer).shapes.values()
        if len(shape) > 1
    )


@functools.lru_cache(maxsize=4096)  # layouts are searched by the thousand
def shareable_parameters(
    architecture: Architecture, layout: Layout, stage: int, replica: Replica, in_buckets: bool
) -> int:
    """Return how many of a replica's parameters lie on a rank of a pipeline ``stage`` just as Megatron has them there,
    on the rank with the fewest; replicas are on consecutive ranks.

    ``in_buckets``: Megatron has parameters in several buffers, where those of one layer may lie apart.
    """
    kinds = stage_kinds(architecture, layout, stage)
    edges = stage == 0, stage == layout.pipeline - 1
    per_stage = layout.size // layout.pipeline
    # As many ranks have all blocks that there are of a layer; the next ones have the same again.
    distinct = min(per_stage, math.lcm(layout.tensor, layout.expert * layout.expert_parts))
    places = {(within % distinct, (stage * per_stage + within) % replica.tensor) for within in range(per_stage)}
    parts = layout.tensor, layout.expert, layout.expert_parts

    def on(position: int, rank: int) -> int:
        outside = _part_outside(architecture, layout.tensor, position % layout.tensor, *edges)
        return _shared(in_buckets, outside, _part_of_rollout(architecture, replica, rank, None)) + sum(
            count
            * _shared(
                in_buckets,
                _part_of_layer(architecture, *parts, position, layer),
                _part_of_rollout(architecture, replica, rank, layer),
            )
            for layer, count in kinds.items()
        )

    return min(itertools.starmap(on, places))


@functools.cache
def _part_of_layer(
    architecture: Architecture, tensor: int, expert: int, expert_tensor: int, within: int, layer: int
) -> _Part:
    """Return what the trainer has of one decoder layer on the rank ``within`` a stage."""
    alone = stage_per_layer(architecture, tensor, expert, expert_tensor)
    position = layer * (alone.size // alone.pipeline) + within
    return _part(architecture, of_layers(megatron_blocks(architecture, alone, position, "local")), tensor)


@functools.cache
def _part_outside(architecture: Architecture, tensor: int, rank: int, first: bool, last: bool) -> _Part:
    """Return what the trainer has outside of decoder layers on one of ``tensor`` ranks; see ``embedding_blocks``."""
    return _part(architecture, embedding_blocks(architecture, tensor, rank, first, last), tensor)


@functools.lru_cache(maxsize=4096)
def _part_of_rollout(architecture: Architecture, replica: Replica, rank: int, layer: int | None) -> _Part:
    """Return what a rank of a replica has of one decoder layer, or outside of them."""
    return _part(architecture, replica.blocks(rank, layer), replica.tensor)


def _part(architecture: Architecture, blocks: Sequence[Block], tensor: int) -> _Part:
    return _Part(blocks, block_shapes(architecture, blocks, tensor))


def _shared(in_buckets: bool, held: _Part, wanted: _Part) -> int:
    """Return elements of the parameters of ``wanted`` that are the same memory as one of ``held``, or as stacks of its
    experts which lie behind each other."""
    own, others = held.shapes, wanted.shapes
    by_tensor, by_parameter = defaultdict(list), defaultdict(list)
    for block in held.blocks:
        by_tensor[block.tensor].append(block)
    for block in wanted.blocks:
        by_parameter[block.parameter].append(block)
    total = 0
    for parameter, blocks in by_parameter.items():
        shifts = _shifts(blocks, by_tensor)
        names = [name for name, *_ in shifts]
        if not shifts or len(set(names)) < len(names) or any(any(rest) for _, _, *rest in shifts):
            continue
        rows = itertools.accumulate(((own[name] or (1,))[0] for name in names), initial=0)
        together = len(names) == 1 or (not in_buckets and all(map(is_expert, names)))
        if together and [row for _, row, *_ in shifts] == list(rows)[:-1]:
            size = math.prod(others[parameter])
            total += size if size == sum(math.prod(own[name]) for name in names) else 0
    return total


def _shifts(blocks: Iterable[Block], held: Mapping[str, Sequence[Block]]) -> list[tuple[Any, ...]]:
    """Return by how much each of the trainer's parameters that ``blocks`` are made of is shifted in the rollout's, in
    order of rows; empty where something of them is not ``held``, by tensor."""
    shifts = set()
    for block in blocks:
        covered = 0
        for own in held.get(block.tensor, ()):
            common = intersect(block.region, own.region)
            if common is not None:
                covered += elements(common)
                shifts.add((own.parameter, *map(operator.sub, _origin(block), _origin(own))))
        if covered != elements(block.region):
            return []
    return sorted(shifts, key=operator.itemgetter(1))


def _origin(block: Block) -> Iterator[int]:
    """Return where the tensor's first element would lie in the block's parameter; a single number counts as a row."""
    region = block.region or ((0, 1),)
    return (offset - begin for offset, (begin, _) in zip(block.offset or (0,), region, strict=True))
