"""Memory of the device that this rank computes on, before a run has put anything there."""

from __future__ import annotations

import os

import psutil
import torch

GB = 2**30


def device_memory_gb() -> tuple[float, float]:
    """Return (free, total) GB of 2^30 bytes of this rank's GPU; without one its share of the host's memory."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return free / GB, total / GB
    memory, ranks = psutil.virtual_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return memory.available / ranks / GB, memory.total / ranks / GB
