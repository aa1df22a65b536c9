"""Measures host memory and time that a rank needs to load its shard of a Hugging Face checkpoint.

    python tools/bench/loading.py recipes/models/qwen2.5-7b [--tensor 4] [--folder /scratch] [--output FILE.json]

MODEL needs only a config.json: a checkpoint of that shape with random bfloat16 weights is written first, in shards of
4 GB as Hugging Face does, and deleted at the end. A process of its own then takes memory for the parameters of one rank
and fills them as a role does (``models/weight_source.py``), while a thread looks at the process's anonymous memory;
pages of the files themselves belong to the system's cache. The floor of the time is a plain read of as many bytes, in
the same run; both find the files in that cache if it is large enough.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from reports import write_report
from rich.console import Console
from rich.progress import track

from rlhf_megatron.models.architecture import Architecture, read_architecture
from rlhf_megatron.models.hf_export import Companions, write_checkpoint
from rlhf_megatron.models.hf_files import CheckpointFiles
from rlhf_megatron.models.rectangles import elements
from rlhf_megatron.models.weight_map import megatron_blocks, whole_blocks
from rlhf_megatron.models.weight_source import RandomWeights, load_blocks
from rlhf_megatron.regather.shard_specs import parameter_shapes
from rlhf_megatron.topology.layout import Layout

MOST_SHARES = 1.3  # of the shard, beside one tensor: what a rank may need at its peak


def main() -> int:
    """Return the exit status: 1 where more memory was needed than the target allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--tensor", type=int, default=4, help="tensor-parallel ranks; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint; default: a temporary folder")
    parser.add_argument("--output", type=Path, help="JSON file for the result")
    options = parser.parse_args()
    architecture = read_architecture(options.model)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = Path(folder) / "model"
        write_random(architecture, options.model, checkpoint)
        result = {"model": options.model.name, "tensor": options.tensor}
        result |= in_own_process(checkpoint, Layout(tensor=options.tensor))
        result["plain_read_s"] = plain_read(checkpoint, int(result["shard_bytes"]))
    Console().print_json(json.dumps(result))
    if options.output:
        write_report(options.output, result)
    return int(result["peak_bytes"] > MOST_SHARES * result["shard_bytes"] + result["largest_tensor_bytes"])


def write_random(architecture: Architecture, companions: Path, folder: Path) -> None:
    """Write a checkpoint of random weights."""
    weights, blocks = RandomWeights(architecture, 1, torch.device("cpu")), whole_blocks(architecture)
    drawn = ((block.tensor, weights.read(block.tensor, block.region).bfloat16()) for block in blocks)
    tracked = track(drawn, "random checkpoint", len(blocks), console=Console(stderr=True))
    write_checkpoint(folder, Companions(companions), tracked, torch.bfloat16)


def in_own_process(checkpoint: Path, layout: Layout) -> dict[str, Any]:
    """Run ``load`` in a fresh process that has nothing of this one's memory."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=load, args=(checkpoint, layout, sender))
    process.start()
    result: dict[str, Any] = receiver.recv()
    process.join()
    return result


def load(checkpoint: Path, layout: Layout, sender: Connection) -> None:
    """Load the shard of the first rank; send the bytes of the shard and the most memory beyond that before it."""
    architecture = read_architecture(checkpoint)
    blocks = megatron_blocks(architecture, layout, 0, "local")
    before, stop, peak = anonymous_memory(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], anonymous_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    parameters = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in parameter_shapes(blocks).items()}
    with CheckpointFiles(checkpoint, architecture) as files:
        load_blocks(blocks, parameters, files)
    seconds = time.perf_counter() - began
    stop.set()
    watcher.join()
    sender.send(
        {
            "shard_bytes": sum(parameter.nbytes for parameter in parameters.values()),
            "largest_tensor_bytes": 2 * max(elements(block.region) for block in whole_blocks(architecture)),
            "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
            "peak_bytes": peak[0] - before,
            "load_s": seconds,
        }
    )


def anonymous_memory() -> int:
    """Return bytes of this process that belong to no file."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status does not tell RssAnon; this benchmark needs Linux 4.5 or later")


def plain_read(checkpoint: Path, count: int) -> float:
    """Return seconds to read so many bytes of the checkpoint's files into one buffer."""
    buffer, left = memoryview(bytearray(1 << 26)), count
    began = time.perf_counter()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while left > 0 and (read := file.readinto(buffer[: min(left, len(buffer))])):
                left -= read
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
