"""A role's weights as a Hugging Face folder: each of its files is written by one rank, many at the same time.

Which rank writes which file follows from model and ranks alone. A writer receives the tensors of its file
from the ranks that hold them, a portion in each round of all ranks, and writes the file when it has all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.durable import begin_folder, finish_folder, partial_of, sync
from rlhf_megatron.models.architecture import Architecture, ModelError
from rlhf_megatron.models.file_form import FileForm
from rlhf_megatron.models.hf_export import (
    SHARD_BYTES,
    Companions,
    CopiedTensor,
    copied_tensors,
    export_form,
    in_runs,
    shard_names,
    write_descriptions,
    write_safetensors,
)
from rlhf_megatron.models.lora import Adaptation, whole_adapter_blocks
from rlhf_megatron.models.peft_files import PEFT_WEIGHTS, write_factors, write_peft_config
from rlhf_megatron.models.stacked import Stacked, stored_tensors
from rlhf_megatron.models.weight_map import Block, stays_float32, whole_blocks
from rlhf_megatron.regather.demand import Shard
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.plan import ShardSpec, plan_regather
from rlhf_megatron.regather.staging import STAGING_BYTES
from rlhf_megatron.runtime.finite import NotFiniteError, only_finite
from rlhf_megatron.topology.exchange import by_rank, gather_objects, max_over_ranks

PORTION_BYTES = 1 << 28  # that a writer receives in a round, or one tensor

_Write = Callable[[Path, dict[str, Tensor]], None]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, and the model's tensors that it is made of."""

    name: str
    parts: tuple[Block, ...]
    dtype: torch.dtype
    nbytes: int


FileTensor = StoredTensor | CopiedTensor


@dataclasses.dataclass(frozen=True)
class Portion:
    """Receipts of a writer in one round: tensors of one file, which is complete with its last portion."""

    file: str
    tensors: Sequence[FileTensor]
    is_last: bool

    @property
    def gathered(self) -> list[StoredTensor]:
        """Those that other ranks hold."""
        return [tensor for tensor in self.tensors if isinstance(tensor, StoredTensor)]

    def copies(self) -> Iterator[tuple[str, Tensor]]:
        """Read the others; raises OSError where that fails."""
        return ((tensor.name, tensor.load()) for tensor in self.tensors if isinstance(tensor, CopiedTensor))


def export_weights(
    folder: Path,
    companions: Companions,
    architecture: Architecture,
    sources: ShardSpec,
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
    shard_bytes: int = SHARD_BYTES,
    layer: Architecture | None = None,
) -> None:
    """Write the model that ``sources`` hold, as ``write_checkpoint`` would; collective over the world.

    With ``layer`` they also hold that layer for multi-token prediction, which the model then has behind its others.

    The ranks that hold some of it write its files, one after the other each; the first of them adds index and config.
    A writer has one file in host memory, and ``PORTION_BYTES`` (or one tensor) beside the buffers of regathering on
    ``device``. All of them see the same folder.

    Raises on all ranks OSError where a writer's disk fails, NotFiniteError where a weight is not finite as ``dtype``;
    then there is no new folder, and an older one stays.
    """
    form, copied = by_rank(min(sources.shard_of), lambda: _read_source(companions, architecture))
    written = [architecture, *([layer] if layer else [])]
    tensors: list[FileTensor] = [*(each for model in written for each in stored_in_order(model, dtype, form)), *copied]
    shards = list(in_runs(tensors, lambda tensor: tensor.nbytes, shard_bytes))
    files = dict(zip(shard_names(len(shards)), shards, strict=True))

    def describe(partial: Path) -> None:
        total = sum(tensor.nbytes for shard in shards for tensor in shard)
        names = [[tensor.name for tensor in shard] for shard in shards]
        write_descriptions(partial, names, total, companions, dtype, architecture.head, predicts=layer is not None)

    with _published_by(min(sources.shard_of), folder, describe) as partial:
        exchange = _Exchange(sources, parameters, form, torch.device(device))
        _write_files(partial, files, exchange, _write_weights)


def _read_source(companions: Companions, architecture: Architecture) -> tuple[FileForm, list[CopiedTensor]]:
    """Return the form of the files, and what is copied into them; raises OSError where those of the source are
    damaged."""
    try:
        return export_form(companions, architecture), copied_tensors(companions.model, architecture.head)
    except ModelError as error:  # they were not at the start
        raise OSError(str(error)) from error


def export_adapters(
    folder: Path,
    base: str,
    architecture: Architecture,
    adaptation: Adaptation,
    sources: ShardSpec,
    parameters: Mapping[str, Tensor],
    device: torch.device | str,
) -> None:
    """Write the adapters that ``sources`` hold as PEFT does, for the model in the folder ``base``; as above.

    PEFT reads one file, so one rank writes it. Raises what ``export_weights`` does.
    """
    blocks = whole_adapter_blocks(architecture, adaptation)
    factors = [StoredTensor(each.tensor, (each,), torch.float32, _meta(each, torch.float32).nbytes) for each in blocks]

    def write(path: Path, held: dict[str, Tensor]) -> None:
        write_factors(path, held, architecture, adaptation, base)

    def describe(partial: Path) -> None:
        write_peft_config(partial, architecture, adaptation, base)

    with _published_by(min(sources.shard_of), folder, describe) as partial:
        exchange = _Exchange(sources, parameters, FileForm(), torch.device(device))
        _write_files(partial, {PEFT_WEIGHTS: factors}, exchange, write)


def _write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    write_safetensors(path, tensors, {"format": "pt"})


def stored_in_order(architecture: Architecture, dtype: torch.dtype, form: FileForm) -> list[StoredTensor]:
    """Return the tensors of an exported model in their order in the files: those of ``dtype``, then what stays
    float32."""
    blocks = {block.tensor: block for block in whole_blocks(architecture)}
    by_type = sorted(blocks.values(), key=lambda block: stays_float32(block.tensor))
    plain = ((each.tensor, _meta(each, torch.float32 if stays_float32(each.tensor) else dtype)) for each in by_type)
    return [
        StoredTensor(
            form.stored_name(name),
            tuple(blocks[part] for part in _parts(name, form.stacked)),
            tensor.dtype,
            tensor.nbytes,
        )
        for name, tensor in stored_tensors(plain, form.stacked)
    ]


def _parts(name: str, stacked: Mapping[str, Stacked]) -> tuple[str, ...]:
    return stacked[name].parts if name in stacked else (name,)


def _meta(block: Block, dtype: torch.dtype) -> Tensor:
    return torch.empty([stop for _, stop in block.region], dtype=dtype, device="meta")


def writers_of(sizes: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the rank that writes each file, given their bytes: writers far from each other, with about as much to do
    each."""
    count = min(len(sizes), len(ranks))
    load = {ranks[(2 * index + 1) * len(ranks) // (2 * count)]: 0 for index in range(count)}
    writers = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        writers[number] = min(load, key=lambda rank: load[rank])
        load[writers[number]] += sizes[number]
    return writers


def portions_of(files: Mapping[str, Sequence[FileTensor]], ranks: Sequence[int]) -> dict[int, list[Portion]]:
    """Return receipts of each rank, round after round."""
    sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in files.values()]
    portions: dict[int, list[Portion]] = defaultdict(list)
    for (file, tensors), writer in zip(files.items(), writers_of(sizes, ranks), strict=True):
        runs = list(in_runs(tensors, lambda tensor: tensor.nbytes, PORTION_BYTES))
        portions[writer] += [Portion(file, run, number == len(runs)) for number, run in enumerate(runs, start=1)]
    return portions


@contextlib.contextmanager
def _published_by(rank: int, folder: Path, describe: Callable[[Path], None]) -> Iterator[Path]:
    """Give all ranks the folder to write into, to which ``rank`` then adds a description and gives its name.

    Collective as it begins and ends. Raises OSError on all ranks where that fails; the older folder is still there.
    """
    partial = partial_of(folder)
    by_rank(rank, lambda: begin_folder(folder))
    try:
        yield partial
        by_rank(rank, lambda: describe(partial))
        by_rank(rank, lambda: finish_folder(folder))
    finally:
        if dist.get_rank() == rank:
            shutil.rmtree(partial, ignore_errors=True)  # what a failure has left takes room


def _write_files(partial: Path, files: Mapping[str, Sequence[FileTensor]], exchange: _Exchange, write: _Write) -> None:
    """Write ``files`` into ``partial``, by all ranks that hold something; collective over the world.

    Raises on all ranks the error of the first that has one, with its number; all stop in the round of the first error.
    """
    portions, rank = portions_of(files, sorted(exchange.sources.shard_of)), dist.get_rank()
    held: dict[str, Tensor] = {}
    problem: OSError | NotFiniteError | None = None
    for of_round in itertools.zip_longest(*portions.values()):
        wanted = {writer: portion for writer, portion in zip(portions, of_round, strict=True) if portion}
        received = exchange.run({writer: portion.gathered for writer, portion in wanted.items()})
        copies = wanted[rank].copies() if rank in wanted else ()
        try:
            for name, tensor in itertools.chain(received, copies):
                held[name] = tensor.to("cpu", copy=True).contiguous()
            if rank in wanted and wanted[rank].is_last:
                _write_synced(partial / wanted[rank].file, held, write)
                held.clear()
        except OSError as error:
            problem = OSError(f"rank {rank}: {error}")
        except NotFiniteError as error:
            problem = error
        if max_over_ranks([float(problem is not None)])[0]:
            break
    problem = next((each for each in gather_objects(problem) if each is not None), None)
    if problem:
        raise problem


def _write_synced(path: Path, tensors: dict[str, Tensor], write: _Write) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # of another node's, which this one may not have seen yet
    write(path, tensors)
    sync(path)


class _Exchange:
    """Exchange of the tensors of a round from the ranks that hold them to those that write them."""

    def __init__(
        self,
        sources: ShardSpec,
        parameters: Mapping[str, Tensor],
        form: FileForm,
        device: torch.device,
    ) -> None:
        self.sources, self._parameters, self._form, self._device = sources, parameters, form, device
        self._held = {shard: sources.blocks_of(shard) for shard in sources.ranks}

    def run(self, wanted: Mapping[int, Sequence[StoredTensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what of ``wanted``, by rank, is this rank's, as files have it; collective over the world, once.

        What is yielded raises NotFiniteError where a tensor is not finite.
        """
        pieces: dict[str, Tensor] = {}
        for dtype in sorted({tensor.dtype for tensors in wanted.values() for tensor in tensors}, key=str):
            blocks = {
                rank: [block for tensor in tensors if tensor.dtype == dtype for block in tensor.parts]
                for rank, tensors in wanted.items()
            }
            pieces |= self._gather(blocks, dtype)
        return self._form.stored(only_finite(pieces.items()))

    def _gather(self, wanted: Mapping[int, Sequence[Block]], dtype: torch.dtype) -> dict[str, Tensor]:
        own = wanted.get(dist.get_rank(), ())
        whole = {
            each.tensor: torch.empty([stop for _, stop in each.region], dtype=dtype, device=self._device)
            for each in own
        }
        plan = plan_regather(self._sources_of(wanted), ShardSpec.of(wanted), dist.get_rank())
        staging = min(STAGING_BYTES, PORTION_BYTES)
        exchange = Regather(plan, dtype, self._device, staging_bytes=staging, direct_bytes=None)
        exchange.run(self._parameters, whole)  # of whatever type each parameter is
        return whole

    def _sources_of(self, wanted: Mapping[int, Sequence[Block]]) -> ShardSpec:
        """Return the ranks' blocks of the tensors of ``wanted``."""
        tensors = {block.tensor for blocks in wanted.values() for block in blocks}
        held: dict[Shard, list[Block]] = {
            shard: [block for block in blocks if block.tensor in tensors] for shard, blocks in self._held.items()
        }
        return ShardSpec(self.sources.shard_of, lambda shard: held[shard])
