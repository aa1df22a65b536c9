"""The ranks of ``regather.py``: one model, all its pairs of layouts. Started by it, under torchrun."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from reports import rows_of
from torch import Tensor
from whole_tensors import WholeTensors

from rlhf_megatron.errors import RecipeError
from rlhf_megatron.kernels.rectangle_copy import copy_rectangles_reference
from rlhf_megatron.models.architecture import Architecture, ModelError, parse_architecture
from rlhf_megatron.models.weight_map import Block
from rlhf_megatron.models.weight_source import window
from rlhf_megatron.regather.execute import Regather
from rlhf_megatron.regather.peer_memory import map_peers
from rlhf_megatron.regather.plan import RankPlan, ShardSpec, plan_regather
from rlhf_megatron.regather.shard_specs import parameter_shapes, rollout_shards, trainer_shards
from rlhf_megatron.topology.layout import Layout
from rlhf_megatron.topology.world import join_world, leave_world

DTYPE = torch.bfloat16
REPEATS = 11
SECONDS_TO_AGREE = 1e-3
PROBE_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
_MIXTURE = {
    "model_type": "qwen3_moe", "tie_word_embeddings": False, "norm_topk_prob": True, "num_experts_per_tok": 8,
    "head_dim": 128, "num_key_value_heads": 4,
}  # fmt: skip
# The fields of config.json that decide shapes.
SHAPES: dict[str, dict[str, Any]] = {
    "7B": _QWEN2
    | {
        "num_hidden_layers": 28, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "30B-A3B": _MIXTURE
    | {
        "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_attention_heads": 32, "vocab_size": 151936,
    },
    "32B": _QWEN2
    | {
        "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "0.5B": _QWEN2
    | {
        "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "toy": _QWEN2
    | {
        "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 250,
    },
    "toy-mixture": _MIXTURE
    | {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One pair of layouts on all ranks; the rollout has replicas of ``tensor`` ranks."""

    name: str
    layout: Layout
    tensor: int
    expert_parallel: bool = False

    @property
    def equal(self) -> bool:
        """True if nothing needs to cross a link."""
        return (self.layout.tensor, self.layout.pipeline) == (self.tensor, 1)


def cases(world: int, mixture: bool) -> list[Case]:
    """Return the pairs of layouts that are measured on ``world`` ranks."""
    n = world
    pairs = [Case(f"TP{n} = TP{n}", Layout(n), n)]
    if n > 1 and not mixture:
        pairs += [
            Case(f"TP{n} -> TP{n // 2} x 2", Layout(n), n // 2),
            Case(f"TP1 x DP{n} -> TP{n}", Layout(data=n), n),
            Case(f"TP{n // 2} PP2 -> TP{n}", Layout(n // 2, 2), n),
        ]
    if n > 1 and mixture:
        experts = Layout(data=n, expert=n, expert_tensor=1)
        pairs = [Case(f"EP{n} -> TP{n}", experts, n), Case(f"EP{n} -> EP{n}", experts, n, expert_parallel=True)]
    return pairs


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add one row to those of a file, which need not be there yet."""
    path.write_text(json.dumps({"rows": [*rows_of(path), row]}), encoding="utf-8")


def measure(model: str, output: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of all pairs of layouts that ``model`` fits; every rank calls it, the first writes into
    ``output``."""
    architecture = parse_architecture(SHAPES[model], model)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    link, copy = link_bandwidth(device), copy_bandwidth(device)
    rows = []
    for case in cases(dist.get_world_size(), architecture.experts is not None):
        row: dict[str, Any] = {"model": model, "gpus": dist.get_world_size(), "layouts": case.name}
        try:
            architecture.check_layout(case.layout)
            architecture.check_layout(Layout(case.tensor))
        except (ModelError, RecipeError):
            continue  # too few heads for this cut
        try:
            row |= measure_case(architecture, case, device, link, copy)
        except torch.OutOfMemoryError as error:  # alike on all ranks, which hold equally much
            row["failed"] = str(error).split(". ")[0]
        rows.append(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            if output:
                append(Path(output), row)
    return rows


def measure_case(
    architecture: Architecture, case: Case, device: torch.device, link: float, copy: float
) -> dict[str, Any]:
    """Return times in seconds, the slowest rank's; bytes of the rank that moves most. ``link``, ``copy``: bytes per
    second."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def ends() -> tuple[ShardSpec, ShardSpec]:
        return (
            trainer_shards(architecture, case.layout, range(world)),
            rollout_shards(architecture, case.tensor, range(world), case.expert_parallel),
        )

    plan_seconds = timed(lambda: plan_regather(*ends(), rank, hosts=world), device, REPEATS)
    row = {"plan_seconds": plan_seconds, "link_gb_per_sec": link / 1e9, "copy_gb_per_sec": copy / 1e9}
    sources, wanted = ends()
    plan = plan_regather(sources, wanted, rank, hosts=world)
    held = random_shard(sources.blocks(rank), device)
    targets = empty_shard(wanted.blocks(rank), device)
    row |= measure_regather(plan, held, targets, device)
    received, sent = plan.bytes_received(DTYPE.itemsize), plan.bytes_sent(DTYPE.itemsize)
    kept = plan.bytes_kept(DTYPE.itemsize)
    row |= {"bytes_received": received, "bytes_local": kept - received, "rollout_bytes": kept}
    row |= {"copies": len(plan.local) + len(plan.receives) + len(plan.sends)}
    row["floor_seconds"] = max(max(received, sent) / link, (kept - received) / copy)
    expected = [digest(tensor) for tensor in targets.values()]

    for tensor in targets.values():
        tensor.fill_(math.nan)
    whole = WholeTensors(architecture, case.layout, sources, wanted.blocks(rank), DTYPE, device)
    before = _allocated(device)
    row["whole_tensors_seconds"] = timed(lambda: whole.run(held, targets), device, 1)
    row["whole_tensors_extra_mb"] = (_highest(device) - before) / 2**20
    row["differing"] = float(expected != [digest(tensor) for tensor in targets.values()])
    row = {key: _largest(value) for key, value in row.items()}
    assert not row.pop("differing"), "the two ways leave different weights"
    row["times_the_floor"] = row["regather_seconds"] / row["floor_seconds"]
    row["times_faster"] = row["whole_tensors_seconds"] / row["regather_seconds"]
    return row | {"equal": case.equal}


def measure_regather(
    plan: RankPlan, held: Mapping[str, Tensor], targets: Mapping[str, Tensor], device: torch.device
) -> dict[str, float]:
    """Return this package's way, checked; and its copies within the rank alone, done by torch."""
    before = _allocated(device)
    peers = map_peers(plan, held)
    regather = Regather(plan, DTYPE, device, peers=peers)
    addresses = [tensor.data_ptr() for tensor in targets.values()]
    seconds = timed(lambda: regather.run(held, targets), device, REPEATS)
    extra = _highest(device) - before
    began = time.perf_counter()
    regather.run(held, targets)
    asked = time.perf_counter() - began  # what Python and the driver take; beyond the rest, a GPU waits for them
    regather.verify(held, targets)
    assert addresses == [tensor.data_ptr() for tensor in targets.values()]
    origins = [window(held[c.source_parameter], c.source_offset, c.region) for c in plan.local]
    ends = [window(targets[c.destination_parameter], c.destination_offset, c.region) for c in plan.local]
    by_torch = timed(lambda: copy_rectangles_reference(ends, origins), device, REPEATS)
    by_messages = seconds
    if peers:
        peers.close()
        sending = Regather(plan, DTYPE, device)
        by_messages = timed(lambda: sending.run(held, targets), device, REPEATS)
    return {
        "regather_seconds": seconds,
        "by_messages_seconds": by_messages,
        "asking_seconds": asked,
        "extra_mb": extra / 2**20,
        "local_copies_by_torch_seconds": by_torch,
    }


def random_shard(blocks: Sequence[Block], device: torch.device) -> dict[str, Tensor]:
    """Return parameters with the same numbers for the same rectangle of a tensor on every rank."""
    parameters = empty_shard(blocks, device)
    generator = torch.Generator(device)
    for block in blocks:
        name = f"{block.tensor}{block.region}".encode()
        generator.manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:7], "little"))
        window(parameters[block.parameter], block.offset, block.region).normal_(generator=generator)
    return parameters


def empty_shard(blocks: Sequence[Block], device: torch.device) -> dict[str, Tensor]:
    """Return parameters as large as ``blocks`` say, of NaN."""
    shapes = parameter_shapes(blocks)
    return {name: torch.full(shape, math.nan, dtype=DTYPE, device=device) for name, shape in shapes.items()}


def digest(tensor: Tensor) -> int:
    """Return a sum over the bits of a bfloat16 tensor, weighted by row and column."""
    bits = tensor.view(torch.int16)
    rows = bits.view(len(bits), -1).sum(1, dtype=torch.int64)
    columns = bits.view(len(bits), -1).sum(0, dtype=torch.int64)
    weights = [torch.arange(1, len(sums) + 1, device=tensor.device) for sums in (rows, columns)]
    return int((rows * weights[0]).sum() * 1_000_003 + (columns * weights[1]).sum())


def timed(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median of ``repeats`` calls after one that does not count, each as long as the slowest rank's;
    seconds."""
    action()
    seconds = []
    for _ in range(repeats):
        _synchronize(device)
        dist.barrier()
        started = _start_together()
        action()
        _synchronize(device)
        seconds.append(_largest(time.perf_counter() - started))
    return statistics.median(seconds)


def _start_together() -> float:
    """Return when all ranks begin, at that time; they are processes of one host and have one clock. Out of a barrier
    they come one after the other, tens of microseconds apart."""
    begin = _largest(time.perf_counter()) + SECONDS_TO_AGREE
    while time.perf_counter() < begin:
        pass
    return begin


def link_bandwidth(device: torch.device) -> float:
    """Return bytes per second that a rank sends while it receives as many, all ranks at once; infinite for one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return math.inf
    size = PROBE_BYTES[device.type]
    ahead, behind = (rank + 1) % world, (rank - 1) % world
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]

    def shift() -> None:
        operations = [dist.P2POp(dist.irecv, buffers[0], behind), dist.P2POp(dist.isend, buffers[1], ahead)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return size / timed(shift, device, REPEATS)


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per second of a plain copy within a rank (each is read once and written once)."""
    size = PROBE_BYTES[device.type]
    one, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return size / timed(lambda: other.copy_(one), device, REPEATS)


def _largest(value: float) -> float:
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated(device: torch.device) -> int:
    """Return bytes in use; from here the highest is counted. Only a GPU's allocator counts."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _highest(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def main() -> None:
    """Run regather_measure.py MODEL OUTPUT, under torchrun."""
    join_world(timeout_minutes=1)
    try:
        measure(sys.argv[1], sys.argv[2])
    finally:
        leave_world()


if __name__ == "__main__":
    main()
