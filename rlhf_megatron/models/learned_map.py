"""vLLM's side of the weight map, learned from vLLM's own loader instead of written by hand.

The ``LoadTrace``s of a replica's ranks become ``Block``s, the form of the tables that families write down, by which
regathering plans. A start is refused where that cannot be done exactly. ``map_files`` keeps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from rlhf_megatron.models.architecture import ModelError
from rlhf_megatron.models.weight_map import Block, Region
from rlhf_megatron.rollout.copy_trace import LoadTrace, StridedCopy


def check_all_is_read(ranks: Sequence[Sequence[Block]], tensor_shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """Raise ModelError where no rank of a replica reads some part of a checkpoint's tensor."""
    regions: dict[str, set[Region]] = {name: set() for name in tensor_shapes}
    for block in itertools.chain(*ranks):
        regions[block.tensor].add(block.region)
    for name, shape in tensor_shapes.items():
        read = sum(prod(stop - start for start, stop in region) for region in regions[name])
        if read != prod(shape):
            raise ModelError(f"{where}: vLLM's loader reads {read} of the {prod(shape)} elements of {name}")


def check_all_is_written(
    blocks: Sequence[Block], parameters: Iterable[str], derived: Iterable[str], where: str
) -> None:
    """Raise ModelError where ``blocks`` are not those of a live engine's ``parameters``, but for ``derived`` ones."""
    odd = {block.parameter for block in blocks} ^ set(parameters).difference(derived)
    if odd:
        raise ModelError(f"{where}: the learned weight map and vLLM's engine disagree on its parameter {min(odd)}")


def rank_blocks(trace: LoadTrace, tensor_shapes: Mapping[str, Sequence[int]], where: str) -> list[Block]:
    """Return the blocks of one rank; raises ModelError where the loader does not only copy rectangles."""
    if trace.problems:
        more = f" (and {len(trace.problems) - 1} more)" if trace.problems[1:] else ""
        raise ModelError(f"{where}: vLLM's loader does not only copy: {trace.problems[0]}{more}")
    blocks = []
    for copy in trace.copies:
        block = as_block(copy, tensor_shapes[copy.tensor], trace.shapes[copy.parameter])
        if block is None:
            raise ModelError(f"{where}: {copy.tensor} reaches vLLM's {copy.parameter} turned or interleaved")
        blocks.append(block)
    overlapping = next(overlaps(blocks), None)
    if overlapping is not None:
        raise ModelError(f"{where}: vLLM's loader writes a part of {overlapping.parameter} twice")
    return blocks


def as_block(copy: StridedCopy, tensor: Sequence[int], parameter: Sequence[int]) -> Block | None:
    """Return a copy as a rectangle of matrices, None where it is none; shapes are those of both whole sides."""
    copy, columns, width = copy.canonical(), _columns(tensor), _columns(parameter)
    row, column = divmod(copy.tensor_offset, columns)
    target_row, target_column = divmod(copy.parameter_offset, width)
    if not tensor:  # a single number
        return None if parameter else Block(copy.tensor, (), copy.parameter, ())
    match list(zip(copy.sizes, copy.tensor_strides, copy.parameter_strides, strict=True)):
        case []:
            rows, wide = 1, 1
        case [(size, 1, 1)] if column + size <= columns:
            rows, wide = 1, size
        case [(size, 1, 1)] if columns == width and column == target_column == 0 and size % columns == 0:
            rows, wide = size // columns, columns
        case [(rows, source, target), (wide, 1, 1)] if source == columns and target == width:
            pass
        case [(rows, source, target)] if source == columns and target == width:
            wide = 1
        case _:
            return None
    if len(tensor) == 1:
        return Block(copy.tensor, ((column, column + wide),), copy.parameter, (copy.parameter_offset,))
    # Between rows and columns a convolution has a dimension of one channel.
    between = tensor[1:-1] if set(tensor[1:-1]) == {1} == set(parameter[1:-1]) else ()
    region = ((row, row + rows), *((0, 1) for _ in between), (column, column + wide))
    return Block(copy.tensor, region, copy.parameter, (target_row, *(0 for _ in between), target_column))


def overlaps(blocks: Iterable[Block]) -> Iterator[Block]:
    """Yield blocks that share elements of their parameter with another."""
    by_parameter: dict[str, list[Block]] = {}
    for block in blocks:
        by_parameter.setdefault(block.parameter, []).append(block)
    for same in by_parameter.values():
        active: list[Block] = []
        for block in sorted(same, key=lambda each: each.offset):
            active = [other for other in active if _end(other)[0] > block.offset[0]]
            for other in active:
                if all(
                    begin < end and first < last
                    for begin, end, first, last in zip(
                        block.offset, _end(other), other.offset, _end(block), strict=True
                    )
                ):
                    yield block
            active.append(block)


def _end(block: Block) -> tuple[int, ...]:
    return tuple(begin + stop - start for begin, (start, stop) in zip(block.offset, block.region, strict=True))


def _columns(shape: Sequence[int]) -> int:
    """Return the columns of a tensor taken as one matrix, with leading dimensions joined; a vector is one row."""
    return shape[-1] if shape else 1
