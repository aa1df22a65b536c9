"""Milliseconds of kernels, by the GPU's own clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from reports import spread


def milliseconds(way: Callable[[], Any], warm_ups: int, repeats: int) -> dict[str, float]:
    """Time what ``way`` has a GPU do. It has work while kernels are being started, so starting them does not count."""
    busy = torch.empty(1 << 29, device="cuda")
    taken = []
    for repeat in range(warm_ups + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy.fill_(1.0)
        begin.record()
        way()
        end.record()
        torch.cuda.synchronize()
        if repeat >= warm_ups:
            taken.append(begin.elapsed_time(end))
    return spread(taken)


def recorded(way: Callable[[], Any]) -> Callable[[], None]:
    """Return what starts the kernels of ``way`` as a CUDA graph, as an engine starts those of a decode step."""
    way()  # what is compiled or set up at a first call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        way()
    return graph.replay
