"""Rectangles of weights: which part of a Hugging Face tensor is stored where in a rank's parameters.

The arithmetic of cutting tensors over ranks, in Megatron's way and in vLLM's, that the files of ``families`` describe
their weights with. Nothing here touches a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from rlhf_megatron.models.description import Architecture, LayerKind
from rlhf_megatron.topology.layout import Layout

Region = tuple[tuple[int, int], ...]  # (start, stop) in each dimension of a Hugging Face tensor
Shapes = Mapping[str, tuple[int, ...]]
Implementation = Literal["local", "transformer_engine"]
SCORE = "score.weight"  # the scalar head, as in Hugging Face's sequence classification
Cut = Literal["whole", "columns", "rows", "gate", "up", "vocabulary", "query", "key", "value"]


class Block(NamedTuple):
    """``parameter[offset : offset + extent]`` holds ``tensor[region]``; extents are the region's.

    A parameter that stacks the matrices of experts counts as one matrix, with one expert's rows behind another's.
    """

    tensor: str
    region: Region
    parameter: str
    offset: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one Hugging Face tensor in a fused parameter, cut by rows or columns over the tensor ranks.

    ``cut``: "columns", "rows", "whole" (replicated), "vocabulary" (rows, padded), "gate" and "up" (rows, one behind the
    other) or a role in attention ("query", "key", "value"). ``rows``: where only these of the tensor are meant.
    ``kind``: of the layer whose attention it is of, if it is.
    """

    tensor: str
    cut: Cut
    parameter: str
    rows: tuple[int, int] | None = None
    kind: LayerKind | None = None


def split(size: int, parts: int, part: int) -> tuple[int, int]:
    """Return (start, stop) of equal ``part`` of ``parts``."""
    return size // parts * part, size // parts * (part + 1)


def _attention_blocks(
    a: Architecture, cut: str, parts: int, part: int, repeats: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield (start row, stop row, offset) of the pieces of q, k or v on tensor rank ``part`` of ``parts``.

    A rank has all its queries first, then its keys, then its values: vLLM's order, and that of our own attention in
    Megatron (``self_attention``). With fewer key-value heads than ranks vLLM ``repeats`` them; Megatron then
    interleaves by group (the queries of a group, its key, its value, the next group) and cuts evenly through groups.
    """
    d, per_group = a.head_dim, a.heads // a.key_value_heads
    if a.key_value_heads < parts and not repeats:
        start, stop = split((a.heads + 2 * a.key_value_heads) * d, parts, part)
        size = per_group * d if cut == "query" else d
        behind = {"query": 0, "key": per_group * d, "value": (per_group + 1) * d}[cut]
        for group in range(a.key_value_heads):
            first = group * (per_group + 2) * d + behind
            low, high = max(first, start), min(first + size, stop)
            if low < high:
                yield group * size + low - first, group * size + high - first, low - start
        return
    queries = a.heads // parts * d * (2 if a.gated_attention else 1)
    if cut == "query":
        yield part * queries, (part + 1) * queries, 0
        return
    kept = max(1, a.key_value_heads // parts)
    first = part * a.key_value_heads // parts
    yield first * d, (first + kept) * d, queries + (kept * d if cut == "value" else 0)


def slot_blocks(
    a: Architecture, shapes: Shapes, slot: Slot, parts: int, part: int, *, repeats: bool
) -> Iterator[Block]:
    """Return the blocks of one Hugging Face tensor on tensor rank ``part`` of ``parts``; ``repeats`` as in vLLM."""
    shape = shapes[slot.tensor]
    if slot.rows is None:
        return _blocks(a, shape, slot, parts, part, repeats=repeats)
    first, stop = slot.rows
    return _moved(_blocks(a, (stop - first, *shape[1:]), slot, parts, part, repeats=repeats), first)


def _moved(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Yield ``blocks`` with regions that begin so many ``rows`` further down their tensors."""
    for block in blocks:
        (start, stop), *rest = block.region
        yield block._replace(region=((rows + start, rows + stop), *rest))


def _blocks(
    a: Architecture, shape: tuple[int, ...], slot: Slot, parts: int, part: int, *, repeats: bool
) -> Iterator[Block]:
    """Yield the same of a tensor of this ``shape``, all of which is meant."""
    rest: Region = tuple((0, size) for size in shape[1:])
    tail = (0,) * len(rest)
    match slot.cut:
        case "whole":
            yield Block(slot.tensor, ((0, shape[0]), *rest), slot.parameter, (0, *tail))
        case "columns":
            yield Block(slot.tensor, ((0, shape[0]), split(shape[1], parts, part)), slot.parameter, (0, 0))
        case "rows":
            yield Block(slot.tensor, (split(shape[0], parts, part), *rest), slot.parameter, (0, *tail))
        case "gate" | "up":
            offset = shape[0] // parts if slot.cut == "up" else 0
            yield Block(slot.tensor, (split(shape[0], parts, part), *rest), slot.parameter, (offset, *tail))
        case "vocabulary":
            start, stop = split(a.padded_vocabulary(parts), parts, part)
            if start < a.vocabulary:
                rows = (start, min(stop, a.vocabulary))
                yield Block(slot.tensor, (rows, *rest), slot.parameter, (0, *tail))
        case _:
            own = a if slot.kind is None else a.of_kind(slot.kind)
            for start, stop, offset in _attention_blocks(own, slot.cut, parts, part, repeats):
                yield Block(slot.tensor, ((start, stop), *rest), slot.parameter, (offset, *tail))


def chunk_prefix(layout: Layout, chunk: int) -> str:
    """Return what the names of a chunk's parameters begin with, where a pipeline stage has several."""
    return f"{chunk}." if layout.virtual_pipeline > 1 else ""


def held_layers(a: Architecture, layout: Layout, stage: int) -> Iterator[tuple[str, int]]:
    """Yield (prefix of its parameters, index in the model) of each decoder layer of a pipeline stage in Megatron."""
    for chunk, layers in enumerate(layout.stage_chunks(a.layers)[stage]):
        for local, index in enumerate(layers):
            yield f"{chunk_prefix(layout, chunk)}decoder.layers.{local}.", index


def elements(region: Region) -> int:
    """Return the number of elements in a rectangle."""
    count = 1
    for start, stop in region:
        count *= stop - start
    return count


def intersect(one: Region, other: Region) -> Region | None:
    """Return the common rectangle of two, or None."""
    if one == other:
        return one
    common = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = a if a > c else c, b if b < d else d
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)
