"""The folder in which vLLM keeps what it has compiled."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rlhf_megatron.compat.patches import patch


@patch(
    "vllm",
    first="0.25.1",
    last="0.33.0",
    why="compiled code is kept by rank of a replica: that of one GPU is loaded on others, and fails (invalid argument)",
    upstream="https://github.com/vllm-project/vllm/pull/38962",
)
def cache_by_device() -> None:
    """Have each GPU of a node but the first keep compiled code in a folder of its own below ``VLLM_CACHE_ROOT``."""
    device = torch.accelerator.current_device_index()
    if device > 0:
        from vllm import envs

        os.environ["VLLM_CACHE_ROOT"] = str(Path(envs.VLLM_CACHE_ROOT) / f"device_{device}")
