"""vLLM's side of the weight map, learned from vLLM's own loader instead of written by hand.

The `LoadTrace`s of a replica's ranks become `Block`s, the form of the tables that families write down, by which
regathering plans. A start is refused where that cannot be done exactly. Maps are kept as JSON by model, layout and vLLM
version, so that a dry run needs no vLLM.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from rlhf_megatron.models.architecture import ModelError
from rlhf_megatron.models.weight_map import Block, Region
from rlhf_megatron.rollout.vllm.copy_trace import StridedCopy
from rlhf_megatron.rollout.vllm.weight_loading import LoadTrace
from rlhf_megatron.untrusted import read_json

FORMAT = 1
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# A map of all ranks of the largest models: 3,600 blocks of 16 ranks.
_MOST_BYTES = 256 * 2**20


def check_all_is_read(ranks: Sequence[Sequence[Block]], tensor_shapes: Mapping[str, Sequence[int]], where: str) -> None:
    """Raises ModelError where no rank of a replica reads some part of a checkpoint's tensor."""
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
    """Raises ModelError where ``blocks`` are not those of a live engine's ``parameters``, but for ``derived`` ones."""
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
    """Columns of a tensor taken as one matrix, with leading dimensions joined; a vector is one row."""
    return shape[-1] if shape else 1


def map_file(folder: Path, config: Mapping[str, Any], tensor: int, expert_parallel: bool, vllm_version: str) -> Path:
    """Return where a map is kept under ``folder``, by all that it depends on."""
    return folder / f"{_digest(config, tensor, expert_parallel)}-{vllm_version}.json"


def stored_map(folder: Path, config: Mapping[str, Any], tensor: int, expert_parallel: bool) -> list[list[Block]] | None:
    """Return the latest map of whatever vLLM version; None: none was learned. Raises ModelError where it is damaged."""
    files = folder.glob(f"{_digest(config, tensor, expert_parallel)}-*.json")
    latest = max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
    return None if latest is None else read_map(latest)


def _digest(config: Mapping[str, Any], tensor: int, expert_parallel: bool) -> str:
    identity = [FORMAT, dict(config), tensor, expert_parallel]
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()


def write_map(path: Path, blocks_of_ranks: Sequence[Sequence[Block]], about: Mapping[str, Any]) -> None:
    """Write the blocks of a replica's ranks as JSON, layers that are alike once."""
    content = {"format": FORMAT, "about": dict(about), "ranks": [_packed(blocks) for blocks in blocks_of_ranks]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
    partial.replace(path)


def read_map(path: Path) -> list[list[Block]]:
    """Return what `write_map` wrote; raises ModelError where the file is missing or damaged."""
    content = read_json(path, ModelError, _MOST_BYTES)
    try:
        if content["format"] != FORMAT:
            raise ModelError(f"{path}: format {content['format']}; this version reads {FORMAT}; learn the map again")
        return [_unpacked(rank) for rank in content["ranks"]]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: is no weight map; remove it and learn the map again") from error


def _packed(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return blocks as {"kinds": blocks of each kind of layer, "layers": [number, kind], "rest": other blocks}."""
    layers: dict[int, list[Any]] = {}
    rest: list[Any] = []
    for block in blocks:
        match = _LAYER.search(block.tensor)
        packed = [_LAYER.sub(".layers.*.", block.tensor), block.region, _LAYER.sub(".layers.*.", block.parameter)]
        if match and _LAYER.search(block.parameter):
            layers.setdefault(int(match.group(1)), []).append([*packed, block.offset])
        else:
            rest.append(block)
    kinds: dict[str, int] = {}
    for alike in layers.values():
        kinds.setdefault(json.dumps(alike), len(kinds))
    numbered = [(layer, kinds[json.dumps(alike)]) for layer, alike in sorted(layers.items())]
    return {"kinds": [json.loads(kind) for kind in kinds], "layers": numbered, "rest": rest}


def _unpacked(rank: Mapping[str, Any]) -> list[Block]:
    named = [(block, None) for block in rank["rest"]]
    named += [(block, layer) for layer, kind in rank["layers"] for block in rank["kinds"][kind]]
    return [_block_of(block, layer) for block, layer in named]


def _block_of(packed: Sequence[Any], layer: int | None) -> Block:
    tensor, region, parameter, offset = packed
    names = [name if layer is None else name.replace(".layers.*.", f".layers.{layer}.") for name in (tensor, parameter)]
    spans = tuple((int(start), int(stop)) for start, stop in region)
    return Block(names[0], spans, names[1], tuple(map(int, offset)))
