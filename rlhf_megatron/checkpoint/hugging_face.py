"""A role's weights as a Hugging Face folder, gathered a few tensors at a time on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture
from rlhf_megatron.models.hf_export import Companions, write_checkpoint
from rlhf_megatron.models.lora import Adaptation, whole_adapter_blocks
from rlhf_megatron.models.peft_files import write_peft
from rlhf_megatron.models.stacked import stored_tensors
from rlhf_megatron.models.weight_map import Block, stacked_tensors, stays_float32, whole_blocks
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.plan import Shard, ShardSpec, elements, plan_regather
from rlhf_megatron.runtime.finite import NotFiniteError, only_finite
from rlhf_megatron.topology.exchange import from_rank

PORTION_BYTES = 1 << 30


def export_weights(
    folder: Path,
    companions: Companions,
    architecture: Architecture,
    sources: ShardSpec,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Writes the model that ``sources`` hold; collective over the world, the first rank that holds some of it writes.

    About ``PORTION_BYTES`` of full tensors are in memory at a time, beside the shard being written.
    Raises OSError on all ranks where the writer's disk fails, NotFiniteError where a weight is not finite as ``dtype``;
    then there is no new folder, and an older one stays.
    """

    def write(tensors: Iterable[tuple[str, Tensor]]) -> None:
        stored = stored_tensors(tensors, stacked_tensors(architecture))
        write_checkpoint(folder, companions, stored, dtype, head=architecture.head)

    _write_gathered(write, whole_blocks(architecture), sources, parameters, dtype, device)


def export_adapters(
    folder: Path,
    base: str,
    architecture: Architecture,
    adaptation: Adaptation,
    sources: ShardSpec,
    parameters: Mapping[str, Tensor],
    device: torch.device | str,
) -> None:
    """Writes the adapters that ``sources`` hold as PEFT does, for the model in the folder ``base``; as above.

    Raises what ``export_weights`` does.
    """

    def write(tensors: Iterable[tuple[str, Tensor]]) -> None:
        write_peft(folder, tensors, architecture, adaptation, base)

    blocks = whole_adapter_blocks(architecture, adaptation)
    _write_gathered(write, blocks, sources, parameters, torch.float32, device)


def _write_gathered(
    write: Callable[[Iterable[tuple[str, Tensor]]], None],
    wanted: Sequence[Block],
    sources: ShardSpec,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Has the first rank that holds something ``write`` the tensors of ``wanted``, as they come; collective.

    Raises on all ranks what comes of the disk or of weights that are not finite.
    """
    writer = min(sources.shard_of)
    held = {shard: sources.blocks_of(shard) for shard in sources.ranks}
    tensors = (
        pair
        for kind, blocks in _portions(wanted, dtype)
        for pair in _gather(blocks, _part(sources.shard_of, held, blocks), parameters, writer, kind, device)
    )
    problem: OSError | NotFiniteError | None = None
    if dist.get_rank() == writer:
        try:
            write(only_finite(tensors))
        except OSError as error:
            problem = OSError(str(error))
        except NotFiniteError as error:
            problem = error
    for _ in tensors:  # all of them, or what a failure has left: the others take part to the end
        pass
    problem = from_rank(problem, writer)
    if problem:
        raise problem


def _portions(wanted: Sequence[Block], dtype: torch.dtype) -> Iterator[tuple[torch.dtype, list[Block]]]:
    """Yields runs of about ``PORTION_BYTES`` of ``wanted``, of one type each: ``dtype``, then what stays float32."""
    for kind, stays in ((dtype, False), (torch.float32, True)):
        blocks = [block for block in wanted if stays_float32(block.tensor) == stays]
        ends = itertools.accumulate(elements(block.region) * kind.itemsize for block in blocks)
        numbered = zip(blocks, (end // PORTION_BYTES for end in ends), strict=True)
        for _, run in itertools.groupby(numbered, key=lambda pair: pair[1]):
            yield kind, [block for block, _ in run]


def _part(shard_of: Mapping[int, Shard], held: Mapping[Shard, Sequence[Block]], wanted: Sequence[Block]) -> ShardSpec:
    """The ranks' blocks of the tensors of ``wanted``."""
    tensors = {block.tensor for block in wanted}
    return ShardSpec(shard_of, lambda shard: [block for block in held[shard] if block.tensor in tensors])


def _gather(
    blocks: Sequence[Block],
    sources: ShardSpec,
    parameters: Mapping[str, Tensor],
    writer: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Iterator[tuple[str, Tensor]]:
    rank = dist.get_rank()
    plan = plan_regather(sources, ShardSpec.of({writer: blocks}), rank)
    whole = {
        block.tensor: torch.empty([stop for _, stop in block.region], dtype=dtype, device=device)
        for block in blocks
        if rank == writer
    }
    Regather(plan, dtype, device, direct_bytes=None).run(parameters, whole)  # of whatever type each parameter is
    yield from whole.items()
