"""Numbers of parameters: of a whole model, and of one GPU of a role's pipeline stage.

All numbers are sums over the weight map, whose names and rectangles say everything about a family. Layers with equal
tensors count as often as there are of them, and are added up once.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.weight_map import (
    Block,
    is_expert,
    layer_of,
    megatron_blocks,
    tensor_shapes,
)
from rlhf_megatron.recipe.role_sections import LoraSection
from rlhf_megatron.topology.layout import Layout


class RankParameters(NamedTuple):
    """Parameters of one rank: of its decoder layers without experts, of their experts, and of embedding, final norm and
    head, with the rows that pad a vocabulary."""

    dense: int
    experts: int
    embeddings: int

    @property
    def total(self) -> int:
        """All together."""
        return sum(self)


def model_parameters(architecture: Architecture) -> int:
    """Return the parameters of the whole model, without padding, as its model card counts them."""
    return sum(map(math.prod, tensor_shapes(architecture).values()))


def active_parameters(architecture: Architecture) -> int:
    """Return those that work on one token: all, but of the experts only the chosen ones."""
    total, experts = model_parameters(architecture), architecture.experts
    if experts is None:
        return total
    routed = sum(math.prod(shape) for tensor, shape in tensor_shapes(architecture).items() if is_expert(tensor))
    return total - routed // experts.count * (experts.count - experts.chosen)


def rank_parameters(architecture: Architecture, layout: Layout, stage: int) -> RankParameters:
    """Return what the fullest rank of a pipeline ``stage`` holds of a role in ``layout``; raises as ``stage_layers``.

    That is the stage's first rank: parts are equal, and the first has never less of a vocabulary.
    """
    dense = experts = 0
    for layer, count in stage_kinds(architecture, layout, stage).items():
        sizes = _layer_parameters(architecture, layout.tensor, layout.expert, layout.expert_parts, layer)
        dense, experts = dense + count * sizes[0], experts + count * sizes[1]
    embeddings = _embedding_parameters(architecture, layout.tensor, stage == 0, stage == layout.pipeline - 1)
    return RankParameters(dense, experts, embeddings)


def adapter_parameters(architecture: Architecture, lora: LoraSection) -> int:
    """Return the parameters of the low-rank adapters of the whole model."""
    return sum(stage_adapters(architecture, lora, range(architecture.layers), expert=1))


def stage_adapters(
    architecture: Architecture, lora: LoraSection, layers: Iterable[int], expert: int
) -> tuple[int, int]:
    """Return the parameters of the adapters of some decoder ``layers`` on one rank, which has one of ``expert`` parts
    of the experts: (without experts, of experts)."""
    dense = experts = 0
    for layer in layers:
        for is_of_expert, rows, columns in _adapted_layers(architecture, lora.modules)[layer]:
            count = lora.rank * (rows + columns)
            dense, experts = dense + count * (not is_of_expert), experts + count * is_of_expert
    return dense, experts // expert


def adapted_parameters(architecture: Architecture, lora: LoraSection, layers: Iterable[int], layout: Layout) -> int:
    """Return the parameters of the linear layers with adapters in some decoder ``layers``, on one rank of
    ``layout``."""
    parts = (layout.tensor, layout.expert * layout.expert_parts)
    adapted = _adapted_layers(architecture, lora.modules)
    return sum(rows * columns // parts[of_expert] for layer in layers for of_expert, rows, columns in adapted[layer])


def stage_layer_indices(architecture: Architecture, layout: Layout, stage: int) -> list[int]:
    """Return the decoder layers of a pipeline ``stage``, over all of its chunks."""
    return [layer for chunk in layout.stage_chunks(architecture.layers)[stage] for layer in chunk]


@functools.cache
def _adapted_layers(architecture: Architecture, modules: tuple[str, ...]) -> Sequence[Sequence[tuple[bool, int, int]]]:
    """Return (whether it is an expert's, rows, columns) of those linear layers of each decoder layer that have these
    Hugging Face names."""
    adapted: list[list[tuple[bool, int, int]]] = [[] for _ in range(architecture.layers)]
    for tensor, shape in tensor_shapes(architecture).items():
        layer = layer_of(tensor)
        if layer is not None and len(shape) == 2 and tensor.split(".")[-2] in modules:
            adapted[layer].append((is_expert(tensor), *shape))
    return adapted


@functools.cache
def layer_kinds(architecture: Architecture) -> Sequence[int]:
    """Return for each decoder layer the first one whose tensors have the same names and shapes."""
    tensors: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for tensor, shape in tensor_shapes(architecture).items():
        layer = layer_of(tensor)
        if layer is not None:
            tensors[layer].append((tensor.partition(f".{layer}.")[2], shape))
    first: dict[tuple[tuple[str, tuple[int, ...]], ...], int] = {}
    return [first.setdefault(tuple(tensors[layer]), layer) for layer in range(architecture.layers)]


def stage_kinds(architecture: Architecture, layout: Layout, stage: int) -> Mapping[int, int]:
    """Return the number of layers of each kind in a pipeline stage."""
    kinds = layer_kinds(architecture)
    return Counter(kinds[layer] for layer in stage_layer_indices(architecture, layout, stage))


@functools.cache
def _layer_parameters(
    architecture: Architecture, tensor: int, expert: int, expert_tensor: int, layer: int
) -> tuple[int, int]:
    """Return (parameters without experts, of experts) of one decoder layer on the first rank that has it."""
    alone = stage_per_layer(architecture, tensor, expert, expert_tensor)
    blocks = megatron_blocks(architecture, alone, alone.position(0, 0, layer), "local")
    return dense_and_experts(block_sizes(architecture, of_layers(blocks), tensor))


@functools.cache
def _embedding_parameters(architecture: Architecture, tensor: int, first: bool, last: bool) -> int:
    """Return parameters outside of decoder layers on the first rank of the first pipeline stage, of the last, or of
    both."""
    return sum(block_sizes(architecture, embedding_blocks(architecture, tensor, 0, first, last), tensor).values())


@functools.cache
def embedding_blocks(architecture: Architecture, tensor: int, rank: int, first: bool, last: bool) -> list[Block]:
    """Return the trainer's blocks outside of decoder layers on one of ``tensor`` ranks, of the ``first`` pipeline
    stage, of the ``last``, or of both."""
    if not first and not last:
        return []
    layout = Layout(tensor) if first and last else stage_per_layer(architecture, tensor, 1, tensor)
    position = layout.position(rank, 0, 0 if first else layout.pipeline - 1)
    blocks = megatron_blocks(architecture, layout, position, "local")
    return [block for block in blocks if layer_of(block.tensor) is None]


def stage_per_layer(architecture: Architecture, tensor: int, expert: int, expert_tensor: int) -> Layout:
    """Return a layout whose pipeline stages have one decoder layer each."""
    data = expert * expert_tensor
    return Layout(tensor, architecture.layers, data, expert=expert, expert_tensor=expert_tensor)


def of_layers(blocks: Iterable[Block]) -> list[Block]:
    """Return those of ``blocks`` that are in decoder layers."""
    return [block for block in blocks if layer_of(block.tensor) is not None]


def block_sizes(architecture: Architecture, blocks: Iterable[Block], tensor: int) -> dict[str, int]:
    """Return the elements of each parameter that ``blocks`` of one of ``tensor`` ranks fill, and that pad a
    vocabulary."""
    return sizes_of(block_shapes(architecture, blocks, tensor))


def sizes_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the elements of each parameter."""
    return {name: math.prod(shape) for name, shape in shapes.items()}


def block_shapes(architecture: Architecture, blocks: Iterable[Block], tensor: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the same, by parameter."""
    shapes = tensor_shapes(architecture)
    extents: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        end = tuple(begin + stop - start for begin, (start, stop) in zip(block.offset, block.region, strict=True))
        if layer_of(block.tensor) is None and len(end) == 2 and shapes[block.tensor][0] == architecture.vocabulary:
            end = (architecture.padded_vocabulary(tensor) // tensor, end[1])
        extents[block.parameter] = tuple(map(max, extents.get(block.parameter, end), end))
    return extents


def dense_and_experts(sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the elements of parameters that are no expert's, and of experts'."""
    experts = sum(size for name, size in sizes.items() if is_expert(name))
    return sum(sizes.values()) - experts, experts
