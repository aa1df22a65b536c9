"""Launches of kernels that a GPU keeps as a CUDA graph, which starts sooner than Python starts one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Recorded:
    """Launches in order, recorded where there is a GPU."""

    def __init__(self, launches: Sequence[Callable[[], None]], device: torch.device) -> None:
        """Take functions that launch kernels of ``device`` on the current stream and allocate nothing; launch none."""
        self._launches = list(launches)  # and with them the memory that the graph reads
        self._graph = _graph_of(self._launches) if self._launches and device.type == "cuda" else None

    def run(self) -> None:
        """Launch all, on the current stream."""
        if self._graph is not None:
            self._graph.replay()
            return
        for launch in self._launches:
            launch()


def _graph_of(launches: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """Return the graph; other threads may use the GPU meanwhile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        for launch in launches:
            launch()
        graph.capture_end()
    return graph
