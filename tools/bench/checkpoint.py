"""Measures how long training waits for a checkpoint, and its slowdown while one is written in the background.

    python launch/torchrun.py --nproc-per-node 1 tools/bench/checkpoint.py MODEL_FOLDER [--output FILE.json]

MODEL_FOLDER needs only a config.json: the weights are random. A learning role takes steps on random rows; every few
steps its state is copied to the host, which training waits for, and written to --folder by a thread, which it does not.
The floor of the write is a plain write of as many bytes with fsync, in the same run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from random_role import make_parser, random_batch, random_role, run

from rlhf_megatron.checkpoint.storage import write_tensors
from rlhf_megatron.data.rollout_batch import RolloutBatch
from rlhf_megatron.runtime.command import command

if TYPE_CHECKING:
    from rlhf_megatron.roles.role import Role


@command
def main() -> int:
    """Return the exit status."""
    parser = make_parser(__doc__ or "", length=1024)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--saves", type=int, default=4, help="the first is a warm-up; default: %(default)s")
    return run(parser.parse_args(), measure)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians over the saves but the first, in seconds."""
    role = random_role(options.model, options.rows * options.length)
    batch, fields = random_batch(role.architecture.vocabulary, options.rows, options.length)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        return save_beside_steps(role, batch, fields, options.saves, Path(folder))


def save_beside_steps(
    role: Role, batch: RolloutBatch, fields: dict[str, torch.Tensor], saves: int, folder: Path
) -> dict[str, Any]:
    """Measure steps alone, then saves with steps beside them."""

    def step() -> float:
        began = time.perf_counter()
        role.update(batch, fields, lambda logprobs, _entropy, given: (-(logprobs * given["weights"]).sum(), {}))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    from rlhf_megatron.checkpoint.role_state import role_tensors

    alone = [step() for _ in range(6)][2:]
    held: dict[str, torch.Tensor] = {}
    waits, writes, beside = [], [], []
    with ThreadPoolExecutor(1) as writer:
        for number in range(saves):
            began = time.perf_counter()
            tensors, about = role_tensors(role, held)
            waited = time.perf_counter() - began
            began = time.perf_counter()
            file = writer.submit(write_tensors, folder / f"step-{number}", "rank-00000.safetensors", tensors, about)
            ended: list[float] = []
            file.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))  # type: ignore[misc]
            steps = []
            while not file.done():
                steps.append(step())
            print(f"save {number}: waited {waited:.2f} s, {len(steps)} steps beside it", file=sys.stderr, flush=True)
            if number:
                waits.append(waited)
                writes.append(ended[0] - began)
                beside += steps
            written = file.result().bytes
            shutil.rmtree(folder / f"step-{number}.partial")
    wait, write = statistics.median(waits), statistics.median(writes)
    return {
        "parameters": sum(parameter.numel() for parameter in role.parameters().values()),
        "bytes": written,
        "wait_s": wait,
        "write_s": write,
        "plain_write_s": plain_write(folder / "plain", written),
        "wait_share_of_save": wait / (wait + write),
        "step_alone_s": statistics.median(alone),
        "step_beside_a_write_s": statistics.median(beside),
        "wait_spread_s": [min(waits), max(waits)],
        "write_spread_s": [min(writes), max(writes)],
    }


def plain_write(path: Path, count: int) -> float:
    """Return seconds to write so many bytes and have them on disk."""
    block = memoryview(bytearray(os.urandom(1 << 20)) * 64)
    began = time.perf_counter()
    with path.open("wb") as file:
        for first in range(0, count, len(block)):
            file.write(block[: count - first])
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
