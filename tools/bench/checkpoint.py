"""How long training waits for a checkpoint, and how much slower it is while one is written in the background.

    torchrun --nproc-per-node 1 tools/bench/checkpoint.py MODEL_FOLDER [--output FILE.json]

MODEL_FOLDER needs only a config.json: the weights are random. A learning role takes steps on random rows; every few
steps its state is copied to the host, which training waits for, and written to --folder by a thread, which it does not.
The floor of the write is a plain write of as many bytes with fsync, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rlhf_megatron.data.batch import RolloutBatch, batch_from_rows
from rlhf_megatron.models.architecture import read_architecture
from rlhf_megatron.monitor.environment import environment_report
from rlhf_megatron.recipe import OptimizerSection, RoleSection
from rlhf_megatron.rollout.environment import prepare_environment
from rlhf_megatron.runtime.checkpoint import write_tensors
from rlhf_megatron.topology import megatron_groups
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.world import join_world


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--saves", type=int, default=4, help="the first is a warm-up; default: %(default)s")
    parser.add_argument("--rows", type=int, default=8, help="of a step; default: %(default)s")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row; default: %(default)s")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prepare_environment()
    join_world()
    megatron_groups.install()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options, Path(folder))
    report = {"command": " ".join(sys.argv), "environment": environment_report(), **result}
    Console().print_json(json.dumps(result))
    if options.output:
        options.output.write_text(json.dumps(report, indent=2, default=str) + "\n")
    return 0


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Medians over the saves but the first, in seconds."""
    from rlhf_megatron.roles.role import Role
    from rlhf_megatron.roles.state import role_tensors

    architecture = read_architecture(options.model)
    section = RoleSection(tokens_per_gpu=options.rows * options.length)
    role = Role(
        "actor", architecture, Layout(), [0], section, dtype="bfloat16", seed=1,
        optimizer=OptimizerSection(learning_rate=1e-6),
    )  # fmt: skip
    for parameter in role.parameters().values():
        parameter.normal_(std=0.02)
    batch = random_batch(architecture.vocabulary, options.rows, options.length)
    fields = {"weights": torch.full((len(batch.tokens),), 1 / len(batch.tokens))}

    def step() -> float:
        began = time.perf_counter()
        role.update(batch, fields, lambda logprobs, _entropy, given: (-(logprobs * given["weights"]).sum(), {}))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    alone = [step() for _ in range(6)][2:]
    held: dict[str, torch.Tensor] = {}
    waits, writes, beside = [], [], []
    with ThreadPoolExecutor(1) as writer:
        for number in range(options.saves):
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


def random_batch(vocabulary: int, count: int, length: int) -> RolloutBatch:
    """Rows of random tokens, of which all but the first are sampled."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(vocabulary, (length,), generator=generator).tolist() for _ in range(count)]
    return batch_from_rows([row[:1] for row in rows], [row[1:] for row in rows])


def plain_write(path: Path, count: int) -> float:
    """Seconds to write so many bytes and have them on disk."""
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
