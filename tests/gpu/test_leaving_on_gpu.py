"""Ranks whose CUDA graphs hold collectives of NCCL leave the world, for which NCCL would wait without end."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from gpu.devices import skip_without_gpus
from parallel.ranks import run_ranks

SECONDS = 90.0


def gather_in_a_graph() -> list[float]:
    """Return what two ranks gather in a graph that is still there when they leave, and that gc does not list, as those
    of an engine."""
    given = torch.full((4,), float(dist.get_rank() + 1), device="cuda")
    gathered = torch.zeros(8, device="cuda")
    dist.all_gather_into_tensor(gathered, given)
    gathered.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_gather_into_tensor(gathered, given)
    graph.replay()
    gather_in_a_graph.graph = graph  # type: ignore[attr-defined]
    gc.freeze()
    found: list[float] = gathered.tolist()
    return found


def test_ranks_leave_with_graphs_of_collectives() -> None:
    skip_without_gpus(1)
    assert run_ranks(gather_in_a_graph, 2, timeout=SECONDS) == [[1.0] * 4 + [2.0] * 4] * 2
