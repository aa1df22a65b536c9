"""Measures ways in which the ranks of a node read a model: each maps the files, or they are read once and shared.

    python tools/bench/reading.py recipes/models/qwen2.5-7b [--layers 4] [--ranks 2 4] [--output FILE.json]

MODEL needs only a config.json: a checkpoint of its shape with random bfloat16 weights is written first, and deleted at
the end. Tensor-parallel ranks, processes of this machine, fill their parameters as a role does, with the files in the
system's cache (warm) or not (cold), in each way:

    mapped       each rank maps the files and reads its rectangles: the default
    read once    model.read_once: ranks read a part each into memory that all of them map (models/node_copy.py)
    warmed       ranks read a part each, which brings it into the system's cache, and then as mapped
    broadcast    a rank reads a tensor and broadcasts it to the others, which take their rectangles

Time is that of the slowest rank; bytes are those of all ranks, from the disk, and by calls of read (not mapped).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import run_on_ranks
from loading import write_random
from reports import spread, write_report
from rich.console import Console
from torch import Tensor

from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.node_copy import Extent, share_of
from rlhf_megatron.models.weight_map import Block, Region, megatron_blocks, whole_blocks
from rlhf_megatron.models.weight_source import load_blocks
from rlhf_megatron.regather.shard_specs import parameter_shapes
from rlhf_megatron.topology.communicators import own_node
from rlhf_megatron.topology.layout import Layout

Load = Callable[[CheckpointFiles, list[Block], dict[str, Tensor]], None]


def main() -> None:
    """Write a checkpoint, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--layers", type=int, help="how many of the model's; default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint; default: a temporary folder")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure_on_rank(options.model, options.repeats, options.output)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        companions, checkpoint = Path(folder) / "config", Path(folder) / "model"
        companions.mkdir()
        config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
        config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
        (companions / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_random(read_architecture(companions), companions, checkpoint)
        os.sync()
        rows = [row for ranks in options.ranks for row in _rows_of(ranks, checkpoint, options.repeats, Path(folder))]
        size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    result = {"model": options.model.name, "layers": config["num_hidden_layers"], "bytes": size, "rows": rows}
    Console().print_json(json.dumps(result))
    if options.output:
        write_report(options.output, result)


def _rows_of(ranks: int, checkpoint: Path, repeats: int, folder: Path) -> list[dict[str, Any]]:
    output = folder / f"{ranks}.json"
    arguments = [str(checkpoint), f"--repeats={repeats}", f"--output={output}"]
    if problem := run_on_ranks(ranks, Path(__file__), arguments):
        sys.exit(f"error: {problem}")
    rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    return rows


def measure_on_rank(checkpoint: Path, repeats: int, output: Path) -> None:
    """Run each way, cold and warm; rank 0 writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    architecture, ranks = read_architecture(checkpoint), dist.get_world_size()
    blocks = megatron_blocks(architecture, Layout(tensor=ranks), dist.get_rank(), "local")
    parameters = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in parameter_shapes(blocks).items()}
    ways: dict[str, Load] = {"mapped": mapped, "read once": read_once, "warmed": warmed, "broadcast": broadcast}
    rows = []
    for cache in ("cold", "warm"):
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, load in ways.items():
                if cache == "cold":
                    leave_cache(checkpoint)
                runs[way].append(measured(checkpoint, architecture, blocks, parameters, load))
        for way, each in runs.items():
            row = {key: spread([run[key] for run in each]) for key in each[0]}
            rows.append({"ranks": ranks, "cache": cache, "way": way, **row})
    if dist.get_rank() == 0:
        output.write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def measured(
    checkpoint: Path, architecture: Architecture, blocks: list[Block], parameters: dict[str, Tensor], load: Load
) -> dict[str, float]:
    """Return seconds of the slowest rank, GB of all."""
    dist.barrier()
    before, began = _input_bytes(), time.perf_counter()
    with CheckpointFiles(checkpoint, architecture) as files:
        load(files, blocks, parameters)
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    read = torch.tensor(_input_bytes(), dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(read)
    from_disk, by_calls = (read / 1e9).tolist()
    return {"seconds": seconds.item(), "gb_from_disk": from_disk, "gb_by_calls": by_calls}


def mapped(files: CheckpointFiles, blocks: list[Block], parameters: dict[str, Tensor]) -> None:
    """Map the files on each rank."""
    load_blocks(blocks, parameters, files)


def read_once(files: CheckpointFiles, blocks: list[Block], parameters: dict[str, Tensor]) -> None:
    """Read once, into a copy in the node's memory."""
    files.read_once({block.tensor for block in blocks}, own_node())
    load_blocks(blocks, parameters, files)


def warmed(files: CheckpointFiles, blocks: list[Block], parameters: dict[str, Tensor]) -> None:
    """Have the files come into the system's cache by long reads first."""
    buffer = bytearray(8 << 20)
    paths = sorted(files.folder.glob("*.safetensors"))
    extents = [Extent(str(path), 0, path.stat().st_size) for path in paths]
    for path, start, stop in share_of(extents, dist.get_rank(), dist.get_world_size()):
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                start += file.readinto(memoryview(buffer)[: stop - start])
    dist.barrier()
    load_blocks(blocks, parameters, files)


def broadcast(files: CheckpointFiles, blocks: list[Block], parameters: dict[str, Tensor]) -> None:
    """Have each tensor read by one rank, in turn, and sent to all."""
    load_blocks(blocks, parameters, _Broadcast(files))


@dataclasses.dataclass
class _Broadcast:
    """A source of weights that all ranks ask for the same tensors, in the same order."""

    files: CheckpointFiles
    turn: int = 0

    def read(self, tensor: str, region: Region) -> Tensor:
        """Return ``tensor[region]``, of what this turn's rank has read."""
        shape, self.turn = self._shape(tensor), self.turn + 1
        source = self.turn % dist.get_world_size()
        is_source = dist.get_rank() == source
        whole = self.files.read(tensor, ()).contiguous() if is_source else torch.empty(shape, dtype=torch.bfloat16)
        dist.broadcast(whole, source)
        return whole[tuple(slice(start, stop) for start, stop in region)]

    def where(self, tensor: str) -> str:
        """Return the origin of a tensor."""
        return self.files.where(tensor)

    def _shape(self, tensor: str) -> list[int]:
        if not hasattr(self, "_shapes"):
            blocks = whole_blocks(read_architecture(self.files.folder))
            self._shapes = {block.tensor: [stop for _, stop in block.region] for block in blocks}
        return self._shapes[tensor]


def leave_cache(checkpoint: Path) -> None:
    """Have the system forget the files; collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in checkpoint.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    dist.barrier()


def _input_bytes() -> list[int]:
    """Return (bytes that this process had the disk read, bytes of its calls of read)."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(": ") for line in lines)
    return [int(fields["read_bytes"]), int(fields["rchar"])]


if __name__ == "__main__":
    main()
